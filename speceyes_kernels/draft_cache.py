"""Caches of what agents said, and speculative drafts from them for a whole batch in one native call.

Sources: AgentSpec (arXiv 2608.24004) for the scopes; the estimator is this project's (``docs/drafting.md``).
"""

from __future__ import annotations

import hashlib
import itertools
import os
import warnings
import weakref
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import _backends, _checks
from .budget import CostModel, _as_count, _as_number
from .cache_file import file_name, raise_if
from .draft_lookup import DeviceLookup, device_for
from .scope_inference import ScopeInference
from .structure import Structure, TokenBytes

_STATS = (
    "tokens", "live_requests", "ended_responses", "evicted_tokens", "bytes", "table_bytes", "nodes", "proposed",
    "accepted", "verified", "judged",
)  # fmt: skip
MAX_DEPTH = 64
MAX_DRAFT_TOKENS = 128  # vLLM's limit
_POLICIES = {None: 0, "survival": 1, "agentspec": 2}
_CAP = f"an int in 0..{MAX_DRAFT_TOKENS}"


class Drafts(NamedTuple):
    """Drafts of B requests: tokens int32 [B, L], lengths int32 [B], survival float32 [B, L] (probability that the draft
    is right up to and including a position; non-increasing along a row). Entries past a row's length are undefined."""

    tokens: Tensor
    lengths: Tensor
    survival: Tensor

    def lists(self) -> list[list[int]]:
        """The drafts as B lists of token ids, as engines want them."""
        lengths = self.lengths.cpu().numpy()
        used = int(lengths.max(initial=0))  # only what is drafted becomes Python objects: they are what costs
        flat = self.tokens[:, :used].cpu().numpy()[np.arange(used) < lengths[:, None]].tolist()
        ends = np.cumsum(lengths).tolist()
        return [flat[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def _scope(*names: Hashable) -> int:
    """The native side's number of an agent or query: a 63-bit hash, so that names cost no memory when they are gone."""
    plain = [n.__index__() if hasattr(n, "__index__") else n for n in names]  # numpy's ints are ints
    digest = hashlib.blake2b(repr(plain).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class DraftCache:
    """Suffix caches kept apart by rollout, query and agent, and an estimator of which drafts will be accepted.

    Parameters
    ----------
    max_tokens : int
        Bound on the tokens held, those of live requests included. Over it the oldest query's ended responses go first,
        then the oldest context of the longest live request. At most 2**30.
    max_depth : int
        Longest context that is matched, 1..64.
    strict_isolation : bool
        One cache per (agent, query, block) and drafts from the matching one only, as AgentSpec publishes it; the default
        asks all levels at once and weighs their evidence.
    estimator : {"mixer", "counts"}
        ``"counts"`` takes the longest match's most frequent continuation with its share as probability.
    policy : {"survival", "agentspec", None}
        How :meth:`propose` shares the batch's budget (see :func:`allocate_budget`); None proposes all that was found.
        ``"agentspec"``: a request's candidates are the occurrences of its longest match, those that agree have its
        draft's first token, and the prefix are the first token and those behind it on which all occurrences agree that
        follow the draft so far.
    cost : CostModel, optional
        Of a verification step; None: ``CostModel()``.
    alpha, gmin, form
        Of ``policy="agentspec"``, as in :func:`allocate_budget`.
    threads : int, optional
        Threads that a batch is extended and drafted by; None: ``torch.get_num_threads()``. Results do not depend on it.
    token_bytes : TokenBytes or sequence of bytes, optional
        The bytes of every token; needed where requests bring a structure.
    levels : str
        Which levels are asked, of L (this rollout), Q (same query), A (same agent) and G (all). For finding out what
        each is worth; all are kept up to date. Not with ``strict_isolation``.
    infer_scopes : bool
        What a request does not say is inferred: agent and query from its prompt's prefix
        (:class:`~speceyes_kernels.scope_inference.ScopeInference`), the structure from the chat template's markers where
        there are ``token_bytes``. False: requests without names share one scope, and have no blocks.

    lookup_backend : {"auto", "cpu", "cuda"}
        Where drafts are looked up. ``"cuda"``: on the current CUDA device, in two launches without a synchronisation;
        :meth:`propose` then returns tensors on that device, the same drafts to the token. Not for
        ``policy="agentspec"``, and with the mixer not for requests with a structure. It has not run on a GPU yet
        (``docs/drafting_gpu.md``), so ``"auto"`` is the CPU.

    Raises
    ------
    BackendUnavailable
        ``lookup_backend="cuda"`` without a GPU, or in a build without CUDA kernels.

    Notes
    -----
    Thread-safe; calls release the interpreter lock. Tokens < 0 are placeholders and are never cached.
    """

    def __init__(
        self,
        *,
        max_tokens: int = 1 << 20,
        max_depth: int = MAX_DEPTH,
        strict_isolation: bool = False,
        estimator: str = "mixer",
        policy: str | None = "survival",
        cost: CostModel | None = None,
        alpha: float = 4096.0,
        gmin: float = 0.1,
        form: str = "equation",
        threads: int | None = None,
        token_bytes: TokenBytes | Sequence[bytes] | None = None,
        levels: str = "LQAG",
        infer_scopes: bool = True,
        lookup_backend: str = "auto",
    ) -> None:
        max_tokens = _checks.as_int(max_tokens, "max_tokens", "an int in 1..2**30")
        max_depth = _checks.as_int(max_depth, "max_depth", f"an int in 1..{MAX_DEPTH}")
        if not 1 <= max_tokens <= 1 << 30:
            raise ValueError(f"max_tokens: expected an int in 1..2**30, got {max_tokens}")
        if not 1 <= max_depth <= MAX_DEPTH:
            raise ValueError(f"max_depth: expected an int in 1..{MAX_DEPTH}, got {max_depth}")
        if estimator not in ("mixer", "counts"):
            raise ValueError(f"estimator: expected 'mixer' or 'counts', got {estimator!r}")
        if not isinstance(levels, str) or not levels or len(set(levels)) != len(levels) or set(levels) - set("LQAG"):
            raise ValueError(f"levels: expected some of the letters L, Q, A, G, got {levels!r}")
        if strict_isolation and len(levels) != 4:
            raise ValueError(f"levels: expected all of them with strict_isolation, got {levels!r}")
        if policy not in _POLICIES:
            raise ValueError(f"policy: expected 'survival', 'agentspec' or None, got {policy!r}")
        if form not in ("equation", "algorithm"):
            raise ValueError(f"form: expected 'equation' or 'algorithm', got {form!r}")
        if cost is not None and not isinstance(cost, CostModel):
            raise TypeError(f"cost: expected a CostModel, got {_checks.describe(cost)}")
        self.policy, self.cost = policy, CostModel() if cost is None else cost
        self.alpha, self.gmin, self.form = _as_number(alpha, "alpha", 0, 1e14), _as_number(gmin, "gmin", 0, 1), form
        self.threads = 0 if threads is None else _as_count(threads, "threads", 1)
        if lookup_backend == "cuda" and policy == "agentspec":
            raise ValueError("lookup_backend: expected 'cpu' with policy='agentspec', got 'cuda'")
        _backends.ops("cpu")  # loads the extension, or says why not
        device = device_for(lookup_backend)
        self._ops = torch.ops.speceyes
        self._propose = self._ops.draft_cache_propose.default
        if token_bytes is not None and not isinstance(token_bytes, TokenBytes):
            token_bytes = TokenBytes(token_bytes)
        self._token_bytes = token_bytes
        self._handle: int = self._ops.draft_cache_new(
            max_tokens,
            max_depth,
            strict_isolation,
            estimator == "counts",
            sum(1 << "LQAG".index(level) for level in levels),
            0 if token_bytes is None else token_bytes._handle,
        )
        self._closer = weakref.finalize(self, self._ops.draft_cache_free, self._handle)
        self.max_tokens, self.max_depth, self.strict_isolation = max_tokens, max_depth, strict_isolation
        self._scopes: ScopeInference | None = None
        self._structure: Structure | None = None  # of requests that send none
        if infer_scopes:
            self._scopes = ScopeInference(None if token_bytes is None else token_bytes.markers)
            self._structure = None if token_bytes is None else Structure(token_bytes.markers.structure)
        self._requests: dict[Hashable, int] = {}
        self._next_request = 1
        self._lookup: DeviceLookup | None = None
        if device is not None:
            self._lookup = DeviceLookup(
                self._handle, device, max_depth=max_depth, split=strict_isolation, counts=estimator == "counts"
            )

    def start(
        self,
        request_id: Hashable,
        prompt_ids: Sequence[int] | np.ndarray | Tensor,
        *,
        agent_id: Hashable = None,
        query_id: Hashable = None,
        structure: Structure | str | None = None,
    ) -> None:
        """A request begins: its prompt is indexed for the rollout; its response will also serve its query and agent.

        Parameters
        ----------
        request_id : hashable
            Not running yet.
        prompt_ids : sequence of int
            Token ids [n].
        agent_id, query_id : int or str, optional
            Whose response it will be, and to which task. None: inferred from the prompt, or with ``infer_scopes=False``
            a name like any other.
        structure : Structure or str, optional
            Delimiters of the response's semantic blocks (see :class:`StructureTracker`); needs the cache's
            ``token_bytes``. Compile a `Structure` once where many requests share it. None: the chat template's blocks,
            or none with ``infer_scopes=False``; ``""``: none.

        Raises
        ------
        ValueError
            The request is already running, or the prompt is no 1-D list of token ids below 2**31.
        """
        if request_id in self._requests:
            raise ValueError(f"request_id: expected a new request, got {request_id!r}, which is running; stop it first")
        prompt = _tokens(prompt_ids, "prompt_ids")
        if structure is not None and self._token_bytes is None:
            raise ValueError("structure: expected None, because this cache was made without token_bytes; pass them")
        if isinstance(structure, str):
            structure = Structure(structure)
        number = self._next_request
        self._next_request += 1
        if structure is None:
            structure = self._structure
        agent, query = _scope("agent", agent_id), _scope("query", agent_id, query_id)
        if self._scopes is not None and (agent_id is None or query_id is None):
            inferred = self._scopes.infer(prompt.numpy())
            agent = inferred[0] if agent_id is None else agent
            query = inferred[1] if query_id is None else query
        blocks = 0 if structure is None else structure._handle
        self._ops.draft_cache_start(self._handle, number, prompt, agent, query, blocks)
        self._requests[request_id] = number

    def extend(
        self,
        request_ids: Sequence[Hashable],
        tokens: Sequence[Sequence[int] | np.ndarray | Tensor] | np.ndarray | Tensor,
        offsets: np.ndarray | Tensor | None = None,
    ) -> None:
        """New tokens of running requests are known: a list of arrays, or one flat array with ``offsets`` [n + 1]."""
        numbers = self._numbers(request_ids)
        self._settle()
        if offsets is None:
            parts = list(tokens)
            if len(parts) != len(numbers):
                raise ValueError(f"tokens: expected {len(numbers)} arrays, one a request, got {len(parts)}")
            flat, ends = _joined(parts), np.zeros(len(parts) + 1, np.int64)
            np.cumsum(np.fromiter(map(len, parts), np.int64, len(parts)), out=ends[1:])
            bounds = torch.from_numpy(ends)
        else:
            flat = _tokens(tokens, "tokens")  # type: ignore[arg-type]
            bounds = torch.as_tensor(offsets).to(torch.int64).contiguous()
            if bounds.shape != (len(numbers) + 1,):
                raise ValueError(f"offsets: expected {len(numbers) + 1} entries, got {_checks.describe(bounds)}")
        self._ops.draft_cache_extend(self._handle, numbers, flat, bounds, self.threads)

    def propose(
        self,
        request_ids: Sequence[Hashable],
        *,
        max_draft_tokens: int | Sequence[int] | np.ndarray | Tensor = 32,
        token_budget: int | None = None,
        plain_tokens: int | None = None,
        min_survival: float = 0.0,
    ) -> Drafts:
        """Drafts for running requests, as many of the batch's best positions as pay for their verification.

        Parameters
        ----------
        request_ids : sequence
            Each once.
        max_draft_tokens : int or sequence of int
            Cap, for all or for each request (remaining length - 1 belongs here), at most 128.
        token_budget : int, optional
            Most draft tokens of the batch; None: by the cost model. Not used with ``policy=None``.
        plain_tokens : int, optional
            Tokens of the step without drafts, those of prefills included; None: the number of requests.
        min_survival : float
            A draft ends before the first position whose survival is below this, in [0, 1].

        Returns
        -------
        Drafts
        """
        numbers = self._numbers(request_ids)
        batch, caps = numbers.shape[0], None
        if type(max_draft_tokens) is int:
            most = max_draft_tokens
        elif isinstance(max_draft_tokens, Sequence | np.ndarray | Tensor):
            given = np.asarray(max_draft_tokens)
            if given.shape != (batch,) or (given.dtype.kind not in "iu" and batch):
                raise ValueError(f"max_draft_tokens: expected one cap a request, got {given.dtype} {given.shape}")
            if given.dtype != np.int32:
                given = np.minimum(np.maximum(given, 0), MAX_DRAFT_TOKENS).astype(np.int32)
            most = min(max(int(given.max()), 0), MAX_DRAFT_TOKENS) if batch else 0
            caps = torch.from_numpy(np.ascontiguousarray(given))
        else:
            most = _checks.as_int(max_draft_tokens, "max_draft_tokens", _CAP)
        if not 0 <= most <= MAX_DRAFT_TOKENS:
            raise ValueError(f"max_draft_tokens: expected {_CAP}, got {most}")
        if not (type(min_survival) is float and 0.0 <= min_survival <= 1.0):
            min_survival = _as_number(min_survival, "min_survival", 0, 1)
        plain = batch if plain_tokens is None else _as_count(plain_tokens, "plain_tokens")
        budget = -1 if token_budget is None else _as_count(token_budget, "token_budget")
        if self._lookup is not None:
            return Drafts(
                *self._lookup.propose(
                    numbers, caps, most, min_survival, _POLICIES[self.policy], plain, budget, self.cost
                )
            )
        drafts = Drafts(
            torch.from_numpy(np.empty((batch, most), np.int32)),  # three times faster than torch.empty
            torch.from_numpy(np.empty(batch, np.int32)),
            torch.from_numpy(np.empty((batch, most), np.float32)),
        )
        self._propose(
            self._handle, numbers, caps, min_survival, _POLICIES[self.policy], plain, budget, self.cost.intensity,
            self.cost.slope, self.alpha, self.gmin, self.form == "algorithm", self.threads, *drafts,
        )  # fmt: skip
        return drafts

    def stop(self, request_id: Hashable, tokens: Sequence[int] | np.ndarray | Tensor | None = None) -> None:
        """A request ended: its response stays cached for its query and agent, the rollout's own index goes.

        ``tokens``: its last ones, where :meth:`extend` has not had them.
        """
        self._settle()
        if tokens is not None:
            self.extend([request_id], [tokens])
        self._ops.draft_cache_stop(self._handle, self._numbers([request_id]))
        del self._requests[request_id]

    def forget(self, agent_id: Hashable, query_id: Hashable | None = None) -> None:
        """Drops the ended responses of one query, or of a whole agent when ``query_id`` is None."""
        agent = _scope("agent", agent_id)
        query = _scope("query", agent_id, query_id)
        self._ops.draft_cache_forget(self._handle, agent, query, query_id is not None)

    def stats(self) -> dict[str, int]:
        """Sizes and counters: tokens held, live requests, ended responses, evicted tokens, bytes (index), table_bytes
        (the estimator's fixed tables), nodes, proposed and accepted draft tokens, verified positions, positions judged in order to propose."""
        self._settle()
        return dict(zip(_STATS, self._ops.draft_cache_stats(self._handle), strict=True))

    def by_source(self) -> dict[str, tuple[int, int]]:
        """(proposed, accepted) draft tokens by the level of the longest match that they continued: L this rollout, Q same
        query, A same agent, G all (ties: the first of these; with ``strict_isolation`` Q stands for the one cache). Since
        the cache was made; not saved."""
        counts = self._ops.draft_cache_by_source(self._handle)
        return {level: (counts[i], counts[i + 4]) for i, level in enumerate("LQAG")}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes what the cache holds and has learned to a file; requests go on meanwhile.

        Running requests are in it as if they ended now, and stay running here. The file takes the place of an older one in
        one step: a crash leaves the old one whole. Names of agents and queries are stored as stable hashes, so any process
        may load it; the text is in it as token ids.

        Raises
        ------
        OSError
            The file system refuses; an older file is as it was.
        """
        name = file_name(path)
        self._settle()
        error, message = self._ops.draft_cache_save(self._handle, name)
        raise_if(error, message, name)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Fills an empty cache from a file: drafts, statistics and the order of eviction are those of the saved cache.

        With a smaller ``max_tokens`` the newest responses are kept. To join several files see `merge_caches`.

        Raises
        ------
        CacheFileError
            No cache file, cut short, damaged, of a newer version, or of other options (``max_depth``,
            ``strict_isolation``); or this cache is not empty. The cache is as it was.
        OSError
            The file system refuses.

        Warns
        -----
        RuntimeWarning
            The estimator's tables are of another version: the text is loaded, what was learned is not.
        """
        name = file_name(path)
        error, message, tables = self._ops.draft_cache_load(self._handle, name)
        raise_if(error, message, name)
        if not tables:
            warnings.warn(
                f"{name}: its estimator is of another version of speceyes_kernels; the text was loaded, survival "
                "probabilities are learned anew",
                RuntimeWarning,
                stacklevel=2,
            )

    def trim(self) -> None:
        """Gives unused memory back to the system, by building the index anew (about a second for a million tokens, the
        cache is locked). Drafts, statistics and running requests stay what they are."""
        self._ops.draft_cache_trim(self._handle)

    def _settle(self) -> None:
        if self._lookup is not None:
            self._lookup.settle()

    def _numbers(self, request_ids: Sequence[Hashable]) -> Tensor:
        try:
            numbers = np.fromiter(map(self._requests.__getitem__, request_ids), np.int64, len(request_ids))
        except KeyError as error:
            raise ValueError(f"request_ids: expected running requests, got {error.args[0]!r}; start it first") from None
        return torch.from_numpy(numbers)


def _tokens(values: Sequence[int] | np.ndarray | Tensor, name: str) -> Tensor:
    array = _checks.as_array(values, name)
    if array.size == 0:
        return torch.zeros(0, dtype=torch.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected a 1-D list of token ids, got {array.dtype} of shape {array.shape}")
    if array.dtype != np.int32:
        if int(array.max()) >= 1 << 31:
            raise ValueError(f"{name}: expected token ids below 2**31, got {int(array.max())}")
        array = (np.maximum(array, -1) if array.dtype.kind == "i" else array).astype(np.int32)
    return torch.from_numpy(np.ascontiguousarray(array))


def _joined(parts: list, name: str = "tokens") -> Tensor:
    """All parts' tokens. At once where they are all arrays of one integer type, or all lists."""
    kinds = set(map(type, parts))
    joined = None
    if kinds == {np.ndarray} and len({p.dtype for p in parts}) == 1 and {p.ndim for p in parts} == {1}:
        joined = np.concatenate(parts)
    elif kinds == {list}:
        joined = list(itertools.chain.from_iterable(parts))
    if joined is not None:
        try:
            return _tokens(joined, name)
        except (TypeError, ValueError):
            pass  # say which
    each = [_tokens(p, f"{name}[{i}]") for i, p in enumerate(parts)]
    return torch.cat(each) if each else torch.zeros(0, dtype=torch.int32)
