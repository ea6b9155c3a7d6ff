"""What a replay drafts with, behind one interface: ours, Arctic Inference's suffix cache, vLLM's ngram, none."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from ..budget import CostModel

DEFAULT_CAP = 32
BLOCKS = '[[("```", "```")], [("<tool_call>", "</tool_call>")]]'  # the structure that requests send in a replay
ARCTIC = "pip install --no-build-isolation --no-deps arctic-inference==0.3.0 (needs nanobind==2.9.2, grpcio-tools, cmake, ninja)"


class DrafterError(ValueError):
    """An unknown drafter or setting, or one whose package is missing."""


@dataclass(frozen=True)
class Sizes:
    """Memory of a drafter: bytes that grow with the text, bytes of fixed tables, tokens held. None: not known."""

    bytes: int | None = None
    table_bytes: int = 0
    tokens: int | None = None


class Drafter:
    """Drafts for running requests. The base class drafts nothing: plain decoding.

    ``start``, then for each step ``propose`` and ``extend`` with the tokens that the step yielded, then ``stop``.
    """

    name = "none"
    budget = "own"  # "global": drafts are the batch's best already

    def begin(self, cost: CostModel) -> None:
        """A replay begins; ``cost`` models its steps."""

    def start(self, request: Hashable, prompt: np.ndarray, agent: str, query: str) -> None:
        pass

    def propose(
        self, requests: Sequence[Hashable], plain_tokens: int | None = None
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        """Draft tokens of each request, and the probability of each prefix to be right where the drafter gives it.
        ``plain_tokens``: of the step without drafts, those of requests that do not draft included."""
        return [[] for _ in requests], None

    def draft_from(self, other: Drafter, request: Hashable) -> list[int]:
        """A draft with these settings from the text that ``other`` holds; only of drafters that do not learn."""
        raise DrafterError(f"drafter {self.name}: cannot draft from another's text")

    def extend(self, requests: Sequence[Hashable], tokens: Sequence[np.ndarray]) -> None:
        pass

    def stop(self, request: Hashable) -> None:
        pass

    def sizes(self) -> Sizes:
        return Sizes()


class Ours(Drafter):
    """:class:`speceyes_kernels.DraftCache`.

    Parameters
    ----------
    estimator : {"mixer", "counts"}
    theta : float
        A draft ends before its survival falls below.
    strict : bool
        Separate caches per (agent, query, block) instead of all levels.
    cap, depth, max_tokens : int
        Longest draft, longest context, bound of the cache.
    blocks : bool
        Requests send the structure `BLOCKS`; needs ``token_bytes``.
    policy : {"theta", "survival", "agentspec"}
        A draft ends at ``theta``; or the cache shares the batch's budget, by the replay's cost model.
    alpha : float
        Of ``policy="agentspec"``.
    levels : str
        Which levels are asked: letters of LQAG.
    scopes : {"given", "inferred", "none"}
        Requests say agent, query and structure; or the cache infers them; or it knows none of them.
    token_bytes : sequence of bytes, optional
        The bytes of every token.
    """

    def __init__(
        self,
        estimator: str = "mixer",
        theta: float = 0.25,
        strict: bool = False,
        cap: int = DEFAULT_CAP,
        depth: int = 64,
        max_tokens: int = 1 << 24,
        blocks: bool = True,
        policy: str = "theta",
        alpha: float = 4096.0,
        levels: str = "LQAG",
        scopes: str = "given",
        token_bytes: Sequence[bytes] | None = None,
    ) -> None:
        from ..draft_cache import DraftCache
        from ..structure import Structure

        if policy not in ("theta", "survival", "agentspec"):
            raise DrafterError(f"drafter ours: policy: expected theta, survival or agentspec, got {policy!r}")
        if scopes not in ("given", "inferred", "none"):
            raise DrafterError(f"drafter ours: scopes: expected given, inferred or none, got {scopes!r}")

        self.cap, self.theta, self.learns = int(cap), float(theta), estimator == "mixer"
        self.cache = DraftCache(
            policy=None if policy == "theta" else policy,
            alpha=float(alpha),
            levels=levels,
            max_tokens=int(max_tokens),
            max_depth=int(depth),
            strict_isolation=bool(strict),
            estimator=estimator,
            token_bytes=token_bytes,
            infer_scopes=scopes == "inferred",
        )
        self.scopes, self.structure = scopes, None
        if not blocks and token_bytes is not None:
            self.structure = Structure("")
        elif scopes == "given" and token_bytes is not None:
            self.structure = Structure(BLOCKS)
        kind = ("ours" if estimator == "mixer" else f"ours {estimator}") + (" strict" if strict else "")
        kind += f" {policy}" if policy != "theta" else ""
        kind += f" alpha={alpha:g}" if policy == "agentspec" else ""
        kind += f" levels={levels}" if levels != "LQAG" else ""
        kind += f" scopes={scopes}" if scopes != "given" else ""
        kind += "" if blocks and token_bytes is not None else " no-blocks"
        if policy == "theta":
            kind += f" theta={self.theta:g}"
        else:
            self.budget, self.theta = "global", 0.0
        self.name = kind + (f" cap={self.cap}" if self.cap != DEFAULT_CAP else "")

    def begin(self, cost: CostModel) -> None:
        self.cache.cost = cost

    def start(self, request: Hashable, prompt: np.ndarray, agent: str, query: str) -> None:
        names = {"agent_id": agent, "query_id": query} if self.scopes == "given" else {}
        self.cache.start(request, prompt, **names, structure=self.structure)
        self.cache.propose(
            [request], max_draft_tokens=0
        )  # judges the first token, which is learned from but not drafted

    def propose(
        self, requests: Sequence[Hashable], plain_tokens: int | None = None
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        drafts = self.cache.propose(
            requests, max_draft_tokens=self.cap, min_survival=self.theta, plain_tokens=plain_tokens
        )
        if self.budget == "global":
            return drafts.lists(), None
        rows = list(zip(drafts.tokens.tolist(), drafts.survival.tolist(), drafts.lengths.tolist(), strict=True))
        return [t[:n] for t, _, n in rows], [s[:n] for _, s, n in rows]

    def extend(self, requests: Sequence[Hashable], tokens: Sequence[np.ndarray]) -> None:
        offsets = np.zeros(len(tokens) + 1, np.int64)
        np.cumsum([len(t) for t in tokens], out=offsets[1:])
        self.cache.extend(requests, np.concatenate(tokens), offsets)

    def stop(self, request: Hashable) -> None:
        self.cache.stop(request)

    def sizes(self) -> Sizes:
        s = self.cache.stats()
        return Sizes(s["bytes"], s["table_bytes"], s["tokens"])


class Arctic(Drafter):
    """Arctic Inference's ``SuffixDecodingCache``, called as vLLM's suffix proposer calls it (vLLM 0.32).

    Parameters
    ----------
    depth, factor, prob :
        ``max_tree_depth``, ``max_spec_factor``, ``min_token_prob``; vLLM's defaults.
    cap : int
        ``num_speculative_tokens``.
    cached : int
        ``max_cached_requests``; -1: no bound.
    """

    def __init__(
        self, depth: int = 24, factor: float = 1.0, prob: float = 0.1, cap: int = DEFAULT_CAP, cached: int = -1
    ) -> None:
        try:
            from arctic_inference.suffix_decoding import SuffixDecodingCache
        except ImportError as error:
            raise DrafterError(f"drafter arctic: Arctic Inference is not usable here ({error}); {ARCTIC}") from None
        self.depth, self.factor, self.prob, self.cap = int(depth), float(factor), float(prob), int(cap)
        self.cache = SuffixDecodingCache(max_tree_depth=self.depth, max_cached_requests=int(cached))
        self._texts: dict[Hashable, tuple[np.ndarray, int]] = {}  # a buffer as vLLM's token_ids_cpu, and its fill
        self.name = f"arctic depth={self.depth} factor={self.factor:g} prob={self.prob:g}" + (
            f" cap={self.cap}" if self.cap != DEFAULT_CAP else ""
        )

    def start(self, request: Hashable, prompt: np.ndarray, agent: str, query: str) -> None:
        text = np.empty(len(prompt) + 1024, np.int32)
        text[: len(prompt)] = prompt
        self._texts[request] = (text, len(prompt))
        self.cache.start_request(request, text[: len(prompt)])

    def propose(
        self, requests: Sequence[Hashable], plain_tokens: int | None = None
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        return [self.draft_from(self, request) for request in requests], None

    def draft_from(self, other: Drafter, request: Hashable) -> list[int]:
        assert isinstance(other, Arctic) and other.depth == self.depth
        text, n = other._texts[request]
        draft = other.cache.speculate(
            request,
            text[max(0, n - self.depth) : n],
            max_spec_tokens=self.cap,
            max_spec_factor=self.factor,
            min_token_prob=self.prob,
        )
        return draft.token_ids

    def extend(self, requests: Sequence[Hashable], tokens: Sequence[np.ndarray]) -> None:
        for request, new in zip(requests, tokens, strict=True):
            self.cache.add_active_response(request, new.tolist())  # vLLM hands over a list too
            text, n = self._texts[request]
            if n + len(new) > len(text):
                text = np.concatenate([text, np.empty(len(text) + len(new), np.int32)])
            text[n : n + len(new)] = new
            self._texts[request] = (text, n + len(new))

    def stop(self, request: Hashable) -> None:
        del self._texts[request]
        self.cache.stop_request(request)

    def sizes(self) -> Sizes:
        try:  # no public way to ask
            trees = [self.cache._global_tree, *self.cache._local_trees.values()]
            return Sizes(sum(tree.estimate_memory() for tree in trees))
        except AttributeError:
            return Sizes()


class Ngram(Drafter):
    """vLLM's ngram rule: the longest n-gram (``least`` to ``most`` tokens) that ends the text and occurs earlier in it,
    at its earliest occurrence; the draft is what followed, up to ``tokens``. ``least`` None: ``most``, as vLLM does."""

    def __init__(self, tokens: int = 5, most: int = 4, least: int | None = None) -> None:
        self.tokens, self.most = int(tokens), int(most)
        self.least = self.most if least is None else int(least)
        if not (1 <= self.least <= self.most and self.tokens >= 1):
            raise DrafterError(f"drafter ngram: expected 1 <= least <= most and tokens >= 1, got {self.__dict__}")
        self._texts: dict[Hashable, bytearray] = {}
        self.name = f"ngram {self.tokens}/{self.most}" + (f" least={self.least}" if self.least != self.most else "")

    def start(self, request: Hashable, prompt: np.ndarray, agent: str, query: str) -> None:
        self._texts[request] = bytearray(np.ascontiguousarray(prompt, np.int32).tobytes())

    def propose(
        self, requests: Sequence[Hashable], plain_tokens: int | None = None
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        return [self._draft(self._texts[r]) for r in requests], None

    def _draft(self, text: bytearray) -> list[int]:
        for n in range(min(self.most, len(text) // 4 - 1), self.least - 1, -1):
            pattern, at = text[-4 * n :], -1
            while True:
                at = text.find(pattern, at + 1, len(text) - 4)
                if at % 4 == 0 or at < 0:  # an occurrence that straddles tokens is none
                    break
            if at >= 0:
                start = at + 4 * n
                return np.frombuffer(bytes(text[start : start + 4 * self.tokens]), np.int32).tolist()
        return []

    def extend(self, requests: Sequence[Hashable], tokens: Sequence[np.ndarray]) -> None:
        for request, new in zip(requests, tokens, strict=True):
            self._texts[request] += np.ascontiguousarray(new, np.int32).tobytes()

    def stop(self, request: Hashable) -> None:
        del self._texts[request]


_KINDS: dict[str, Callable[..., Drafter]] = {"ours": Ours, "arctic": Arctic, "ngram": Ngram, "none": Drafter}
_SETTINGS: dict[str, dict[str, Callable[[str], object]]] = {
    "ours": {
        "estimator": str, "theta": float, "strict": lambda v: bool(int(v)), "cap": int, "depth": int, "max_tokens": int,
        "blocks": lambda v: bool(int(v)), "scopes": str,
        "policy": str, "alpha": float, "levels": str,
    },
    "arctic": {"depth": int, "factor": float, "prob": float, "cap": int, "cached": int},
    "ngram": {"tokens": int, "most": int, "least": int},
    "none": {},
}  # fmt: skip


@dataclass(frozen=True)
class DrafterSpec:
    """One drafter with its settings, written as text: what a job of a sweep names and another process makes."""

    text: str
    kind: str
    settings: tuple[tuple[str, object], ...]

    def make(self, token_bytes: Sequence[bytes] | None = None) -> Drafter:
        """A fresh drafter. ``token_bytes``: of every token; without them ours knows no semantic blocks.

        Raises
        ------
        DrafterError
            Settings out of range, or a rival's package is missing.
        """
        more = {"token_bytes": token_bytes} if self.kind == "ours" else {}
        try:
            return _KINDS[self.kind](**dict(self.settings), **more)
        except ValueError as error:
            if isinstance(error, DrafterError):
                raise
            raise DrafterError(f"drafter {self.text}: {error}") from None


def drafter_specs(text: str) -> list[DrafterSpec]:
    """Drafters from ``KIND[:setting=value[/value...],...]``; several values are a sweep over all mixtures.

    ``ours:theta=.25/.5``, ``ours:estimator=counts``, ``ours:strict=1``, ``ours:blocks=0``,
    ``arctic:depth=24/64,factor=1,prob=.1/.3``, ``ngram:tokens=5,most=4``, ``none``.

    Raises
    ------
    DrafterError
        An unknown kind, setting or value.
    """
    kind, _, rest = text.partition(":")
    if kind not in _KINDS:
        raise DrafterError(f"drafter: expected one of {', '.join(_KINDS)}, got {kind!r} in {text!r}")
    known = _SETTINGS[kind]
    sweep: dict[str, list[tuple[str, object]]] = {}
    for part in filter(None, rest.split(",")):
        name, _, values = part.partition("=")
        if name not in known:
            raise DrafterError(
                f"drafter {kind}: expected settings among {', '.join(known) or '(none)'}, got {name!r} in {text!r}"
            )
        try:
            sweep[name] = [(v, known[name](v)) for v in values.split("/")]
        except ValueError:
            raise DrafterError(f"drafter {kind}: {name}: cannot read {values!r} in {text!r}") from None
    specs = []
    for chosen in itertools.product(*sweep.values()):
        words = ",".join(f"{name}={word}" for name, (word, _) in zip(sweep, chosen, strict=True))
        settings = tuple((name, value) for name, (_, value) in zip(sweep, chosen, strict=True))
        specs.append(DrafterSpec(f"{kind}:{words}" if words else kind, kind, settings))
    return specs


def parse_drafters(text: str, token_bytes: Sequence[bytes] | None = None) -> list[Callable[[], Drafter]]:
    """Makers of drafters, for each of :func:`drafter_specs`."""
    return [functools.partial(spec.make, token_bytes) for spec in drafter_specs(text)]
