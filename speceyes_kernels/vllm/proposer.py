"""Drafts for vLLM's speculative decoding from the draft cache (vLLM 0.32, ``method="custom_class"``, V1 runner).

``--speculative-config '{"method": "custom_class", "model": "speceyes_kernels.vllm.AgentSpecProposer",
"num_speculative_tokens": 32}'`` and ``--worker-extension-cls speceyes_kernels.vllm.GateWorker``, which tells the proposer
whose row is whose and what each step costs. One batched native call a step. Design: ``docs/vllm_proposer.md``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from ..budget import CostModel
from ..draft_cache import MAX_DRAFT_TOKENS, DraftCache
from ..structure import Structure, TokenBytes
from .draft_options import DraftOptionError, DraftOptions, compile_structure, parse_draft_options
from .draft_stats import DraftStats

logger = logging.getLogger("vllm.speceyes_kernels")

SETTINGS = "speceyes_drafting"
_DEFAULTS: dict[str, Any] = {
    "max_tokens": 1 << 22, "max_depth": 64, "strict_isolation": False, "estimator": "mixer", "policy": "survival",
    "infer_scopes": True, "intensity": 256.0, "learn_cost": True, "structure": True, "load": None,
}  # fmt: skip
#: Below this a draft is not even followed: the price of a token at the smallest step.
_HOPELESS = 0.02

_structure = functools.lru_cache(maxsize=1024)(compile_structure)


def draft_settings(additional_config: Any) -> dict[str, Any]:
    """Engine-wide settings with defaults filled in; ValueError naming the field."""
    given = (additional_config or {}).get(SETTINGS, {})
    if not isinstance(given, dict):
        raise ValueError(f"{SETTINGS}: expected an object of {', '.join(_DEFAULTS)}, got {given!r}")
    for name, value in given.items():
        if name not in _DEFAULTS:
            raise ValueError(f"{SETTINGS}: expected settings among {', '.join(_DEFAULTS)}, got {name!r}")
        if isinstance(_DEFAULTS[name], bool) and not isinstance(value, bool):
            raise ValueError(f"{SETTINGS}.{name}: expected true or false, got {value!r}")
    return {**_DEFAULTS, **given}


@dataclass(slots=True)
class _Request:
    """A request that the cache follows."""

    state: Any  # the runner's record of it; a request that reuses the id has another
    options: DraftOptions
    stops: frozenset[int]
    prompt: int  # tokens of its prompt
    held: int  # tokens of it that the cache has
    ended: bool = False


@dataclass(slots=True)
class _Step:
    """What the scheduler asked of the step that runs."""

    began: float
    tokens: int
    scheduled: dict[str, int]
    drafted: dict[str, int]
    timed: bool


class AgentSpecProposer:
    """Proposer by the batch; engine-wide settings through ``--additional-config '{"speceyes_drafting": {...}}'``:
    ``max_tokens``, ``max_depth``, ``strict_isolation``, ``estimator``, ``policy``, ``infer_scopes`` (as in `DraftCache`),
    ``intensity`` (as in `CostModel`), ``learn_cost`` (fit the cost model to step times), ``structure`` (follow semantic
    blocks; needs the tokenizer), ``load`` (cache file to start from).

    A request says whose it is by ``extra_args``: see `parse_draft_options`.
    """

    def __init__(self, vllm_config: Any) -> None:
        from .worker_extension import FLAG, asked_for

        settings = draft_settings(vllm_config.additional_config)
        self.most = vllm_config.speculative_config.num_speculative_tokens
        if not 1 <= self.most <= MAX_DRAFT_TOKENS:
            raise ValueError(f"num_speculative_tokens: expected 1..{MAX_DRAFT_TOKENS}, got {self.most}")
        if not asked_for(vllm_config):
            raise ValueError(
                "AgentSpecProposer: expected the worker extension, which names the rows of the batch, got "
                f"worker_extension_cls={vllm_config.parallel_config.worker_extension_cls!r}; add {FLAG}"
            )
        self.learn_cost = settings.pop("learn_cost")
        table = _token_table(vllm_config.model_config) if settings.pop("structure") else None
        self.follows_structure = table is not None
        load = settings.pop("load")
        try:
            cost = CostModel(settings.pop("intensity"))
            self.cache = DraftCache(cost=cost, token_bytes=table, **settings)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{SETTINGS}.{error}") from None
        if load is not None:
            try:
                self.cache.load(load)
            except (OSError, TypeError, ValueError) as error:
                raise ValueError(f"{SETTINGS}.load: {error}") from error
        self.stats = DraftStats()
        self.max_batched = vllm_config.scheduler_config.max_num_batched_tokens
        self.runner: Any = None  # set by the worker extension
        self._requests: dict[str, _Request] = {}
        self._step: _Step | None = None

    def load_model(self, *_args: Any, **_kwargs: Any) -> None:
        """Nothing to load."""

    # ---- called by the worker extension ------------------------------------------------------------------------------
    def begin_step(self, scheduler_output: Any) -> None:
        """A step starts: requests that the scheduler let go leave; what it verifies and how many tokens is noted."""
        self._stop(r for r in scheduler_output.finished_req_ids if r in self._requests)
        self._step = _Step(
            perf_counter(),
            scheduler_output.total_num_scheduled_tokens,
            scheduler_output.num_scheduled_tokens,
            {r: len(t) for r, t in scheduler_output.scheduled_spec_decode_tokens.items()},
            timed=not scheduler_output.scheduled_encoder_inputs,
        )

    def figures(self) -> dict[str, Any]:
        """Counters, sizes and the cost model (see `DraftStats`)."""
        cost = self.cache.cost
        fitted = {"slope": cost.slope, "seconds": cost.seconds, "intensity": cost.intensity}
        return self.stats.as_dict(self.cache.stats(), self.cache.by_source(), fitted)

    # ---- called by the runner ----------------------------------------------------------------------------------------
    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Drafts, one list a row of the batch; rows without a new token (partial prefills) get none.

        A fault costs drafts, never the engine: it is logged and counted, and the requests are learned afresh.
        """
        if self.runner is None:
            raise RuntimeError("AgentSpecProposer: not joined to a runner; start it by the flags of vLLM")
        step, self._step = self._step, None
        try:
            return self._propose(step, sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        except Exception:
            logger.exception("speceyes drafting: a step failed; its requests are learned afresh")
            self.stats.faults += 1
            self._stop(list(self._requests))
            return [[] for _ in sampled_token_ids]

    def _propose(
        self, step: _Step | None, sampled: list[list[int]], totals: np.ndarray, tokens: np.ndarray
    ) -> list[list[int]]:
        began = perf_counter()
        if step is not None and step.timed and step.tokens and self.learn_cost:
            self.cache.cost.observe(step.tokens, began - step.began)
        ids: list[str] = self.runner.input_batch.req_ids
        requests = self.runner.requests
        self._stop([r for r, known in self._requests.items() if requests.get(r) is not known.state])
        rows = [i for i, new in enumerate(sampled) if new]
        self._learn(rows, ids, sampled, totals, tokens, step)
        learned = perf_counter()
        drafts: list[list[int]] = [[] for _ in sampled]
        rows = [i for i in rows if not self._requests[ids[i]].ended]
        if rows:
            prefilling = [r for r, new in zip(ids, sampled, strict=True) if not new]
            caps = [self._cap(self._requests[ids[i]], int(totals[i])) for i in rows]
            found = self.cache.propose(
                [ids[i] for i in rows],
                max_draft_tokens=caps,
                plain_tokens=len(rows) + self._prefill(step, prefilling, len(rows)),
                min_survival=_HOPELESS,
            )
            for i, draft in zip(rows, found.lists(), strict=True):
                drafts[i] = _up_to_stop(draft, self._requests[ids[i]].stops)
                self.stats.proposed += len(drafts[i])
                self.stats.lengths.add(len(drafts[i]))
            self.stats.steps += 1
            self.stats.propose_us.add(1e6 * (perf_counter() - learned))
            self.stats.update_us.add(1e6 * (learned - began))
        return drafts

    def _learn(
        self,
        rows: Sequence[int],
        ids: Sequence[str],
        sampled: list[list[int]],
        totals: np.ndarray,
        tokens: np.ndarray,
        step: _Step | None,
    ) -> None:
        grown, parts = [], []
        for i in rows:
            name, total = ids[i], int(totals[i])
            prompt = int(self.runner.input_batch.num_prompt_tokens[i])
            known = self._requests.get(name)
            if known is not None and (known.held > total - len(sampled[i]) or known.prompt != prompt):
                self._stop([name])  # vLLM took tokens back, or a session's next input came
                known = None
            if known is None:
                known = self._start(name, i, tokens[i, :prompt])
            new = tokens[i, known.held : total]
            if known.stops and not known.stops.isdisjoint(sampled[i]):
                # vLLM drops what was sampled after an end.
                kept = len(_up_to_stop(sampled[i], known.stops))
                new = new[: len(new) - len(sampled[i]) + kept]
                known.ended = True
            known.ended |= self._left(known.state, total) <= 0
            known.held = total
            if step is not None and (drafted := step.drafted.get(name)):
                self.stats.verify(drafted, min(drafted, len(sampled[i]) - 1))
            grown.append(name)
            parts.append(new)
        if grown:
            bounds = np.zeros(len(parts) + 1, np.int64)
            np.cumsum([len(p) for p in parts], out=bounds[1:])
            self.cache.extend(grown, np.concatenate(parts), bounds)

    def _start(self, name: str, row: int, prompt: np.ndarray) -> _Request:
        state = self.runner.requests[name]
        params = state.sampling_params
        options, structure = self._options(name, params)
        ids = prompt
        if getattr(state, "prompt_embeds", None) is not None:  # no tokens where embeddings came in
            ids = np.where(self.runner.input_batch.is_token_ids[row, : len(prompt)], prompt, -1)
        self.cache.start(name, ids, agent_id=options.agent_id, query_id=options.query_id, structure=structure)
        stops = set() if params is None else {*(params.stop_token_ids or ()), params.eos_token_id} - {None}
        self._requests[name] = started = _Request(state, options, frozenset(stops), len(prompt), len(prompt))
        return started

    def _options(self, name: str, params: Any) -> tuple[DraftOptions, Structure | str | None]:
        """Fields are checked where requests enter; one that comes in another way must not stop the engine."""
        try:
            options = parse_draft_options(params.extra_args if params is not None else None, check_structure=False)
            if not options.structure:
                return options, options.structure
            if not self.follows_structure:
                raise DraftOptionError(
                    "structure", f"this engine follows none ({SETTINGS}.structure is off, or it has no tokenizer)"
                )
            return options, _structure(options.structure)
        except DraftOptionError as error:
            self.stats.refused_options += 1
            logger.warning("speceyes drafting: request %s is drafted for without its fields: %s", name, error)
            return DraftOptions(), None

    def _stop(self, names: Iterable[str]) -> None:
        for name in list(names):
            if self._requests.pop(name, None) is not None:
                self.cache.stop(name)

    def _left(self, state: Any, total: int) -> int:
        """Tokens that the request may still get."""
        params = state.sampling_params
        left = self.runner.max_model_len - total
        if params is not None and params.max_tokens is not None:
            left = min(left, params.max_tokens - len(state.output_token_ids))
        return left

    def _cap(self, request: _Request, total: int) -> int:
        return max(0, min(self.most, self._left(request.state, total) - 1)) if request.options.draft else 0

    def _prefill(self, step: _Step | None, unfinished: Sequence[str], decoding: int) -> int:
        """Prompt tokens that the next step will surely compute too: what is left of prompts that have begun.

        Requests that still wait are unknown here.
        """
        if step is None:
            return 0
        left = 0
        for name in unfinished:
            state = self.runner.requests[name]
            left += max(0, state.num_tokens - state.num_computed_tokens - step.scheduled.get(name, 0))
        return min(left, max(0, self.max_batched - decoding))


def _up_to_stop(tokens: list[int], stops: frozenset[int]) -> list[int]:
    """Through the first token that ends a request."""
    for at, token in enumerate(tokens):
        if token in stops:
            return tokens[: at + 1]
    return tokens


def _token_table(model_config: Any) -> TokenBytes | None:
    if model_config.skip_tokenizer_init:
        return None
    from vllm.tokenizers.registry import cached_tokenizer_from_config

    from .token_bytes import table_of

    try:
        tokenizer = cached_tokenizer_from_config(model_config)
        return table_of(tokenizer, model_config.get_vocab_size())
    except Exception:
        logger.exception("speceyes drafting: the tokenizer could not be read; structures are not followed")
        return None
