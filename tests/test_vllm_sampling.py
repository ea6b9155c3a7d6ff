"""vLLM's own rejection sampler on drafts without probabilities, as the proposer gives them, against its plain sampler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chi_squared import goodness, homogeneity, tail

from speceyes_kernels.vllm.repairs import repair_expansion

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
ROWS, VOCAB, TEMPERATURE = 20_000, 48, 0.8
UNLIKELY = 1e-4  # seeds are fixed: an honest sampler passes every time, or never


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """The sampler's kernels, as vLLM's CPU worker installs them; on a GPU they are Triton's."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        import vllm.v1.sample.rejection_sampler  # noqa: F401

        current_platform.import_kernels()
        current_platform.register_triton_kernel_overrides()
    repair_expansion()


def device() -> torch.device:
    from vllm.platforms import current_platform

    return torch.device(current_platform.device_type)


def metadata(rows: int) -> Any:
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    none = torch.zeros(rows, device=device())
    return SamplingMetadata(
        temperature=none + TEMPERATURE, all_greedy=False, all_random=True, top_p=None, top_k=None,
        generators={}, max_num_logprobs=None, no_penalties=True, prompt_token_ids=None, frequency_penalties=none,
        presence_penalties=none, repetition_penalties=none + 1, output_token_ids=[[] for _ in range(rows)],
        allowed_token_ids_mask=None, bad_words_token_ids={}, logitsprocs=LogitsProcessors(),
    )  # fmt: skip


def drafted(logits: torch.Tensor, draft: list[int]) -> torch.Tensor:
    """[ROWS, len(draft) + 1] tokens, -1 behind a rejection, of one sequence with ``logits`` [len(draft) + 1, VOCAB]."""
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    n = len(draft) + 1
    spec = SpecDecodeMetadata.make_dummy([draft] * ROWS, device())
    at = torch.arange(ROWS * n, device=device()).view(ROWS, n)
    spec.target_logits_indices, spec.bonus_logits_indices = at[:, :-1].reshape(-1), at[:, -1].contiguous()
    return RejectionSampler(Sampler())(
        spec, None, logits.to(device()).repeat(ROWS, 1), metadata(ROWS)
    ).sampled_token_ids


def plain(logits: torch.Tensor) -> list[int]:
    from vllm.v1.sample.sampler import Sampler

    return Sampler()(logits.to(device()).repeat(ROWS, 1), metadata(ROWS)).sampled_token_ids.flatten().tolist()


@pytest.fixture(scope="module")
def sequence() -> tuple[torch.Tensor, list[int]]:
    """Logits of three positions and a draft of two: its first token likely, its second middling."""
    logits = 1.5 * torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(5))
    order = logits.argsort(dim=-1, descending=True)
    return logits, [int(order[0, 0]), int(order[1, 2])]


def positions(logits: torch.Tensor, draft: list[int], seed: int) -> list[list[int]]:
    """Tokens at each position of the samples that went along with the draft before it."""
    torch.manual_seed(seed)
    tokens = drafted(logits, draft)
    out = []
    for position in range(len(draft) + 1):
        out.append(tokens[:, position].tolist())
        assert -1 not in out[-1]
        if position < len(draft):
            tokens = tokens[tokens[:, position] == draft[position]]
    return out


def test_every_position_is_plain_samplings(sequence: tuple[torch.Tensor, list[int]]) -> None:
    logits, draft = sequence
    exact = torch.softmax(logits.double() / TEMPERATURE, -1).tolist()
    found = positions(logits, draft, 11)
    assert 500 < len(found[2]) < len(found[1]) < ROWS
    torch.manual_seed(12)
    for tokens, p, row in zip(found, exact, logits, strict=True):
        chance, bins = goodness(tokens, p)
        assert bins >= 15 and chance > UNLIKELY
        assert homogeneity(tokens, plain(row))[0] > UNLIKELY


def test_accepting_every_draft_is_found_out(
    sequence: tuple[torch.Tensor, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.sample import rejection_sampler

    monkeypatch.setattr(
        rejection_sampler, "generate_uniform_probs", lambda n, *_: torch.zeros(n, dtype=torch.float64, device=device())
    )
    logits, draft = sequence
    exact = torch.softmax(logits.double() / TEMPERATURE, -1).tolist()
    found = positions(logits, draft, 11)
    assert len(found[2]) == ROWS  # the fault is in
    assert goodness(found[0], exact[0])[0] < 1e-12 and goodness(found[1], exact[1])[0] < 1e-12
    assert homogeneity(found[0], plain(logits[0]))[0] < 1e-12


@pytest.mark.parametrize("slip", [0.04, -0.04])
def test_four_percent_too_much_or_too_little_is_found_out(
    sequence: tuple[torch.Tensor, list[int]], slip: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test is sharp: drafts accepted 4 % more or less often than they ought to be."""
    from vllm.v1.sample import rejection_sampler

    uniform = rejection_sampler.generate_uniform_probs
    monkeypatch.setattr(rejection_sampler, "generate_uniform_probs", lambda *args: uniform(*args) - slip)
    logits, draft = sequence
    found = positions(logits, draft, 11)
    assert goodness(found[0], torch.softmax(logits[0].double() / TEMPERATURE, -1).tolist())[0] < UNLIKELY


def test_requests_settings_reach_their_draft_positions() -> None:
    """In vLLM 0.32 the CPU worker lost them, and divided draft positions by uninitialised memory."""
    from vllm.v1.sample import rejection_sampler

    for values, dtype in (([0.5, 0.0, 2.0], torch.float32), ([7, 0, 9], torch.int32), ([7, 0, 9], torch.int64)):
        x = torch.tensor(values, dtype=dtype, device=device())
        counts = torch.tensor([2, 2, 5], dtype=torch.int32, device=device()).cumsum(0, dtype=torch.int32)
        got = rejection_sampler.expand_batch_to_tokens(x, counts, 9, replace_from=0, replace_to=1)
        want = [values[0]] * 2 + [1] * 2 + [values[2]] * 5
        assert got.tolist() == want and got.dtype == dtype and got.is_contiguous()
    assert repair_expansion() is False  # once is enough


def test_tail_is_the_chi_squared_distributions() -> None:
    """Quantiles as printed in tables."""
    for statistic, degrees, chance in ((3.841, 1, 0.05), (18.307, 10, 0.05), (124.342, 100, 0.05), (23.209, 10, 0.01)):
        assert tail(statistic, degrees) == pytest.approx(chance, rel=2e-3)
