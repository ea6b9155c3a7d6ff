"""Errors of the public layer: what was given, what was expected; the same whichever way a call takes, before any change."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from separability_cases import ALL_POOLS

import speceyes_kernels as sk
from speceyes_kernels._backends import ops

LOGITS = torch.zeros(3, 100)
CU = torch.tensor([0, 3])


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: sk.topk_stats([1.0]), TypeError, r"logits: expected a 2-D float tensor, got list"),
        (
            lambda: sk.topk_stats(LOGITS.long()),
            TypeError,
            r"logits: expected a 2-D float tensor, got a 2-D int64 tensor",
        ),
        (lambda: sk.topk_stats(LOGITS.double()), TypeError, r"convert to float32"),
        (
            lambda: sk.topk_stats(LOGITS[0]),
            ValueError,
            r"expected a 2-D float tensor, got a 1-D float32 tensor of shape",
        ),
        (lambda: sk.topk_stats(LOGITS.to_sparse()), TypeError, r"logits: expected a dense tensor, got layout"),
        (lambda: sk.topk_stats(LOGITS, out=5), TypeError, r"out: expected a TopkStats of six tensors, got int 5"),
        (lambda: sk.partial_topk(LOGITS, offset=2**63 - 10), ValueError, r"offset: expected an int in 0..2\*\*62"),
        (lambda: sk.topk_stats(LOGITS, 1), ValueError, r"k: expected an int in 2..256, got 1"),
        (lambda: sk.topk_stats(LOGITS, 257), ValueError, r"k: expected an int in 2..256, got 257"),
        (lambda: sk.topk_stats(LOGITS, 64.0), TypeError, r"k: expected an int"),
        (lambda: sk.topk_stats(LOGITS, 101), ValueError, r"k: expected at most the valid vocabulary \(100\), got 101"),
        (lambda: sk.topk_stats(LOGITS, valid_vocab=63), ValueError, r"k: expected at most the valid vocabulary \(63\)"),
        (lambda: sk.topk_stats(LOGITS, valid_vocab=101), ValueError, r"valid_vocab: expected 1..100"),
        (lambda: sk.topk_stats(LOGITS, valid_vocab=0), ValueError, r"valid_vocab: expected 1..100"),
        (lambda: sk.topk_stats(LOGITS, backend="gpu"), ValueError, r"backend: expected 'auto' or one of"),
        (lambda: sk.topk_stats(torch.zeros(1, 2**20 + 1)), ValueError, r"at most 1048576 columns"),
        (lambda: sk.token_separability(LOGITS, form="paper"), ValueError, r"form: expected 'exclude_top1'"),
        (lambda: sk.token_separability(LOGITS, form=["paper"]), ValueError, r"form: expected 'exclude_top1'"),
        (lambda: sk.token_separability(LOGITS, eps=0.0), ValueError, r"eps: expected a number in 1e-37..1e37, got 0.0"),
        (lambda: sk.token_separability(LOGITS, eps=1e-46), ValueError, r"eps: expected a number in 1e-37..1e37"),
        (lambda: sk.token_separability(LOGITS, eps=math.nan), ValueError, r"eps: expected a number in 1e-37..1e37"),
        (lambda: sk.token_separability(LOGITS, eps=torch.tensor(1e-6)), TypeError, r"eps: expected a number"),
        (lambda: sk.token_separability(LOGITS, eps="1e-6"), TypeError, r"eps: expected a number in .*, got str '1e-6'"),
        (
            lambda: sk.token_separability(LOGITS, min_competitors=2.0),
            TypeError,
            r"min_competitors: expected an int >= 1",
        ),
        (
            lambda: sk.token_separability(LOGITS, out=torch.zeros(3, requires_grad=True)),
            ValueError,
            r"out: expected a tensor without requires_grad",
        ),
        (
            lambda: sk.answer_separability(LOGITS, CU, pool={"min", "mean"}),
            TypeError,
            r"pool: expected a name or a list",
        ),
        (lambda: sk.answer_separability(LOGITS, CU, bottom_share="x"), TypeError, r"bottom_share: expected a number"),
        (lambda: sk.score_for_confidence("x"), TypeError, r"tau: expected a confidence in \[0, 1\], got str"),
        (lambda: sk.accept([1.0], 0.5), TypeError, r"score: expected a number or a tensor, got list"),
        (lambda: sk.accept(LOGITS.to_sparse(), 0.5), TypeError, r"score: expected a dense tensor"),
        (lambda: sk.confidence(None), TypeError, r"score: expected a number or a tensor, got NoneType"),
        (lambda: sk.confidence("1", pool="log"), TypeError, r"score: expected a number or a tensor, got str"),
        (lambda: sk.confidence(LOGITS.to_sparse(), pool="log"), TypeError, r"score: expected a dense tensor"),
        (lambda: sk.convert_threshold(None), TypeError, r"score: expected a number, got NoneType"),
        (lambda: sk.SeparabilityPool(1, max_tokens=1, valid_vocab=-3), ValueError, r"valid_vocab: expected None or an"),
        (
            lambda: sk.token_separability(LOGITS, min_competitors=0),
            ValueError,
            r"min_competitors: expected an int >= 1",
        ),
        (
            lambda: sk.token_separability(LOGITS, out=torch.zeros(4)),
            ValueError,
            r"out: expected a contiguous tensor of",
        ),
        (lambda: sk.token_separability(LOGITS, out=torch.zeros(6)[::2]), ValueError, r"not contiguous"),
        (
            lambda: sk.token_separability(LOGITS, out=torch.zeros(3).half()),
            TypeError,
            r"out: expected dtype torch.float32",
        ),
        (lambda: sk.answer_separability(LOGITS, CU, pool="median"), ValueError, r"pool: expected names among"),
        (lambda: sk.answer_separability(LOGITS, CU, pool=()), ValueError, r"pool: expected at least one"),
        (lambda: sk.answer_separability(LOGITS, CU, pool=("min", "min")), ValueError, r"pool: expected each name once"),
        (
            lambda: sk.answer_separability(LOGITS, torch.tensor([0, 4])),
            ValueError,
            r"cu_seqlens: expected to rise from 0",
        ),
        (
            lambda: sk.answer_separability(LOGITS, torch.tensor([0, 2, 1, 3])),
            ValueError,
            r"cu_seqlens: expected to rise",
        ),
        (lambda: sk.answer_separability(LOGITS, torch.tensor([0.0, 3.0])), TypeError, r"cu_seqlens: expected an int32"),
        (
            lambda: sk.answer_separability(LOGITS, CU, token_mask=torch.ones(3)),
            TypeError,
            r"token_mask: expected a bool",
        ),
        (
            lambda: sk.answer_separability(LOGITS, CU, token_mask=torch.ones(2) > 0),
            ValueError,
            r"token_mask: expected a",
        ),
        (
            lambda: sk.answer_separability(LOGITS, CU, bottom_share=0.0),
            ValueError,
            r"bottom_share: expected a number in",
        ),
        (lambda: sk.answer_separability(LOGITS, CU, bottom_rounding="up"), ValueError, r"bottom_rounding: expected"),
        (lambda: sk.partial_topk(LOGITS, offset=-1), ValueError, r"offset: expected an int in 0..2\*\*62, got -1"),
        (lambda: sk.merge_partials([]), ValueError, r"partials: expected a non-empty list of PartialTopk"),
        (
            lambda: sk.merge_partials(sk.partial_topk(LOGITS, offset=0)),
            ValueError,
            r"partials: expected a non-empty list",
        ),
        (
            lambda: sk.merge_partials([sk.partial_topk(LOGITS, 8, offset=0), sk.partial_topk(LOGITS, 9, offset=100)]),
            ValueError,
            r"partials\[1\].values: expected the shape",
        ),
        (lambda: sk.SeparabilityPool(1, max_tokens=1, valid_vocab=1 << 70), ValueError, r"from k \(64\) to 1048576"),
        (lambda: sk.SeparabilityPool(1, max_tokens=1, device="x"), ValueError, r"device: expected one that is here"),
        (lambda: sk.SeparabilityPool(1, max_tokens=1, device=1.5), TypeError, r"device: expected a torch.device or"),
        (lambda: sk.token_separability(LOGITS, eps=10**400), ValueError, r"eps: expected .*, got an integer that no"),
        (lambda: sk.accept(1.0, 10**400), ValueError, r"tau: expected a confidence in \[0, 1\], got an integer"),
        (lambda: sk.accept(torch.ones(2) + 1j, 0.5), TypeError, r"score: expected a tensor of real numbers, got a 1-D c"),
        (lambda: sk.confidence(torch.ones(2) > 0), TypeError, r"score: expected a tensor of real numbers, got a 1-D bo"),
        (lambda: sk.SeparabilityPool(0, max_tokens=1), ValueError, r"num_slots: expected an int >= 1, got 0"),
        (lambda: sk.SeparabilityPool(1, max_tokens=True), TypeError, r"max_tokens: expected an int >= 1"),
        (lambda: sk.SeparabilityPool(1, max_tokens=1, pools=("min", "x")), ValueError, r"pools: expected names among"),
    ],
)
def test_errors_say_what_was_given_and_expected(call, error, text):
    with pytest.raises(error, match=text):
        call()


def _buffer() -> torch.Tensor:
    return torch.zeros(3, 200)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch says that these are a prototype
    NESTED = torch.nested.nested_tensor([torch.zeros(100), torch.zeros(90)])
SPARSE_SLOTS = torch.tensor([0, 1, 2]).to_sparse()


@pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda b: sk.token_separability(LOGITS.to_sparse(), backend=b, out=torch.empty(3)),
            TypeError,
            "logits: .*dense",
        ),
        (lambda b: sk.token_separability(LOGITS, backend=b, out=torch.zeros(3).to_sparse()), TypeError, "out: .*dense"),
        (lambda b: sk.answer_separability(LOGITS.to_sparse(), CU, backend=b), TypeError, "logits: .*dense tensor"),
        (lambda b: sk.answer_separability(LOGITS, CU.to_sparse(), backend=b), TypeError, "cu_seqlens: .*dense tensor"),
        (
            lambda b: sk.answer_separability(LOGITS, CU, token_mask=(LOGITS[:, 0] == 0).to_sparse(), backend=b),
            TypeError,
            "token_mask: expected a dense tensor",
        ),
        (lambda b: sk.answer_separability(LOGITS, torch.tensor([1, 3]), backend=b), ValueError, "rise from 0 to 3"),
        (lambda b: sk.answer_separability(LOGITS, torch.tensor([0, 2]), backend=b), ValueError, "rise from 0 to 3"),
        (lambda b: sk.answer_separability(LOGITS, CU, pool=(["min"],), backend=b), ValueError, "pool: expected names"),
        (
            lambda b: sk.answer_separability(LOGITS, CU, pool=("min",), out=torch.empty(1), backend=b),
            ValueError,
            r"out: expected a contiguous tensor of shape \(1, 1\)",
        ),
        (
            lambda b: sk.answer_separability(torch.zeros(1, 2**20 + 1), CU // 3, valid_vocab=99, backend=b),
            ValueError,
            "at most 1048576 columns",
        ),
        # Outputs in the memory of something else.
        (
            lambda b: sk.token_separability(x := _buffer(), out=x.view(-1)[:3], backend=b),
            ValueError,
            "memory with logits",
        ),
        (
            lambda b: sk.token_separability((x := _buffer())[:, :100], out=x[0, 98:101], backend=b),
            ValueError,
            "memory with",
        ),
        (
            lambda b: sk.token_separability((x := _buffer())[:, :100], out=x.view(-1)[198:201], backend=b),
            ValueError,
            "out: expected memory of its own, got a tensor that shares memory with logits",
        ),
        (
            lambda b: sk.token_separability((x := torch.zeros(100, 3)).T, out=x[99], backend=b),
            ValueError,
            "shares memory with logits",
        ),
        (
            lambda b: sk.answer_separability(x := _buffer(), CU, out=x[2, 199:], backend=b),
            ValueError,
            "out: expected memory of its own, .* with logits",
        ),
        (
            lambda b: sk.answer_separability(
                LOGITS, c := torch.tensor([0, 3]), out=c.view(torch.float32)[3:], backend=b
            ),
            ValueError,
            "out: expected memory of its own, .* with cu_seqlens",
        ),
        (
            lambda b: sk.topk_stats(
                LOGITS,
                out=(
                    (t := torch.zeros(4))[:3],
                    torch.zeros(3, dtype=torch.int64),
                    torch.zeros(3),
                    torch.zeros(3),
                    t[1:],
                    torch.zeros(3, dtype=torch.int32),
                ),
                backend=b,
            ),
            ValueError,
            r"out.lse: expected memory of its own, .* with out.top1",
        ),
        (lambda b: sk.token_separability(LOGITS, backend=[b]), TypeError, "backend: expected 'auto' or one of"),
        (lambda b: sk.token_separability(LOGITS, backend=[b], out=torch.empty(3)), TypeError, "backend: expected"),
        (lambda b: sk.answer_separability(LOGITS, CU, backend=[b]), TypeError, "backend: expected 'auto' or one of"),
        (lambda b: sk.partial_topk(LOGITS, offset=0, backend=[b]), TypeError, "backend: expected 'auto' or one of"),
        (lambda b: sk.SeparabilityPool(1, max_tokens=1, backend=[b]), TypeError, "backend: expected 'auto' or one of"),
        # One meta tensor would send a whole op to its fake: results never written, or an update lost.
        (
            lambda b: sk.token_separability(LOGITS, backend=b, out=torch.empty(3, device="meta")),
            ValueError,
            "out: expected a contiguous tensor of shape .* on cpu",
        ),
        (lambda b: sk.answer_separability(LOGITS, CU.to("meta"), backend=b), ValueError, "cu_seqlens: .* on cpu, got"),
        (
            lambda b: sk.answer_separability(LOGITS, CU, out=torch.empty(1, device="meta"), backend=b),
            ValueError,
            "out: expected a contiguous tensor of shape .* on cpu",
        ),
        (
            lambda b: sk.answer_separability(
                LOGITS, CU, token_mask=torch.ones(3, dtype=torch.bool, device="meta"), backend=b
            ),
            ValueError,
            "token_mask: .* on cpu, got",
        ),
        (
            lambda b: sk.SeparabilityPool(3, max_tokens=1, backend=b).update(LOGITS, torch.arange(3).to("meta")),
            ValueError,
            "slots: .* on cpu, got",
        ),
        (
            lambda b: sk.SeparabilityPool(3, max_tokens=1, backend=b).update(
                LOGITS, torch.arange(3), torch.ones(3, dtype=torch.bool, device="meta")
            ),
            ValueError,
            "accepted: .* on cpu, got",
        ),
        (
            lambda b: sk.token_separability(NESTED, out=torch.empty(2), backend=b),
            TypeError,
            "logits: expected a dense tensor",
        ),
        (lambda b: sk.answer_separability(NESTED, CU, backend=b), TypeError, "logits: expected a dense tensor"),
        (
            lambda b: sk.SeparabilityPool(3, max_tokens=1, backend=b).update_scores(None, torch.arange(0)),
            TypeError,
            "scores: expected a float32 tensor",
        ),
        (
            lambda b: sk.SeparabilityPool(3, max_tokens=1, backend=b).update(LOGITS, SPARSE_SLOTS),
            TypeError,
            "slots: expected a dense tensor",
        ),
        (
            lambda b: sk.SeparabilityPool(3, max_tokens=1, backend=b).update(LOGITS.to_sparse(), torch.arange(3)),
            TypeError,
            "logits: expected a dense tensor",
        ),
        (
            lambda b: sk.SeparabilityPool(3, max_tokens=1, backend=b).update_scores(
                LOGITS[:, 0].to_sparse(), torch.arange(3)
            ),
            TypeError,
            "scores: expected a dense tensor",
        ),
    ],
)
def test_errors_are_those_of_the_full_checks_in_every_backend(call, error, text, backend):
    sk.token_separability(LOGITS, backend=backend)  # from here on a native backend takes plain arguments the short way
    with pytest.raises(error, match=text):
        call(backend)


PART = sk.partial_topk(torch.zeros(3, 100), 8, offset=0, backend="reference")


@pytest.mark.parametrize(
    ("parts", "error", "text"),
    [
        (
            [PART, PART._replace(values=None)],
            TypeError,
            r"partials\[1\].values: expected a tensor of torch.float32, got N",
        ),
        (
            [PART._replace(values=None)],
            TypeError,
            r"partials\[0\].values: expected a tensor of torch.float32, got NoneType",
        ),
        ([PART._replace(lse=[0.0] * 3)], TypeError, r"partials\[0\].lse: expected a tensor of torch.float32, got list"),
        ([PART._replace(argmax=1)], TypeError, r"partials\[0\].argmax: expected a tensor of torch.int64, got int 1"),
        (
            [PART, PART._replace(argmax=PART.argmax.int())],
            TypeError,
            r"partials\[1\].argmax: expected a tensor of torch.int6",
        ),
        ([PART._replace(values=PART.values.to_sparse())], TypeError, r"partials\[0\].values: expected a dense tensor"),
        ([PART._replace(lse=PART.lse[:2])], ValueError, r"partials\[0\].lse: expected shape \(3,\) on cpu"),
        ([PART._replace(values=PART.values[0])], ValueError, r"partials\[0\].values: expected the shape"),
        ([PART, tuple(PART)], TypeError, r"partials\[1\]: expected a PartialTopk, got tuple"),
        ([None], TypeError, r"partials\[0\]: expected a PartialTopk, got NoneType"),
        (None, ValueError, r"partials: expected a non-empty list of PartialTopk, got NoneType"),
        (torch.zeros(2, 3), ValueError, r"partials: expected a non-empty list of PartialTopk, got a 2-D"),
    ],
)
def test_partials_that_are_none(parts, error, text):
    for merge in (sk.merge_partials, sk.partials_separability):
        with pytest.raises(error, match=text):
            merge(parts)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_subclasses_do_not_hide_shared_memory(backend):
    class Named(torch.Tensor):
        pass

    x = _buffer()
    before = x.clone()
    with pytest.raises(ValueError, match="out: expected memory of its own, .* with logits"):
        sk.token_separability(x, out=x.view(-1)[597:].as_subclass(Named), valid_vocab=200, backend=backend)
    with pytest.raises(ValueError, match="out: expected memory of its own, .* with logits"):
        sk.token_separability(x.as_subclass(Named), out=x.view(-1)[597:], valid_vocab=200, backend=backend)
    assert torch.equal(x, before)


def test_native_ops_refuse_shared_memory_themselves():
    """For callers of torch.ops; and what the short way relies on."""
    native, x = ops("cpu"), _buffer()
    with pytest.raises(ValueError, match="out: expected memory of its own, .* with logits"):
        native.token_separability(x, 64, 200, False, 1e-6, 8, x.view(-1)[597:])
    with pytest.raises(ValueError, match="records: expected memory of its own, .* with logits"):
        native.answer_separability(
            x, CU, None, 64, 200, False, 1e-6, 8, [0], 0.2, False, x[0, :6].view(3, 2), torch.empty(1, 1)
        )
    values = torch.empty(3, 64)
    with pytest.raises(ValueError, match="lse: expected memory of its own, .* with values"):
        native.partial_topk(x, 64, 200, 0, values, torch.empty(3, dtype=torch.int64), values[1, 61:])


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_outputs_between_the_rows_of_the_logits_are_fine(backend):
    buffer = torch.randn(3, 200)
    x, out = buffer[:, :100], buffer[1, 100:103]
    want = sk.token_separability(x.clone(), backend=backend)
    assert sk.token_separability(x, out=out, backend=backend) is out
    assert torch.equal(out, want)
    pooled = sk.answer_separability(x, CU, out=buffer[2, 100:101], backend=backend)
    assert pooled.item() == want.min().item() == buffer[2, 100].item()


def test_pool_errors_change_nothing():
    pool = sk.SeparabilityPool(4, max_tokens=2, pools=ALL_POOLS)
    pool.update(LOGITS, torch.tensor([0, 1, 2]))
    before = [t.clone() for t in (pool.sums, pool.mins, pool.counts, pool.scores)]
    slots = torch.tensor([0, 1, 2])
    for call, error, text in [
        (
            lambda: pool.update(LOGITS, torch.tensor([0, 1, 4])),
            ValueError,
            r"slots: expected values in -1..3, got 0..4",
        ),
        (lambda: pool.update(LOGITS, torch.tensor([0, 1, -2])), ValueError, r"slots: expected values in -1..3"),
        (lambda: pool.update(LOGITS, torch.tensor([0, 1])), ValueError, r"slots: expected a tensor of shape \(3,\)"),
        (lambda: pool.update(LOGITS, slots.float()), TypeError, r"slots: expected an int32 or int64 tensor"),
        (lambda: pool.update(LOGITS, slots, slots), TypeError, r"accepted: expected a bool tensor"),
        (lambda: pool.update(LOGITS[:, :50], slots), ValueError, r"k: expected at most the valid vocabulary \(50\)"),
        (lambda: pool.update_scores(torch.zeros(3), slots), ValueError, r"logprobs: expected float32 \[N\] because"),
        (
            lambda: pool.update_scores(torch.zeros(3).double(), slots, logprobs=torch.zeros(3)),
            TypeError,
            r"scores: expected a float32 tensor",
        ),
        (
            lambda: pool.update_scores(torch.zeros(3), slots, logprobs=torch.zeros(2)),
            ValueError,
            r"logprobs: expected a 1-D tensor",
        ),
        (lambda: pool.read(torch.tensor([-1])), ValueError, r"slots: expected values in 0..3"),
        (lambda: pool.reset(torch.tensor([7])), ValueError, r"slots: expected values in -1..3"),
        (lambda: pool.read(pools="mode"), ValueError, r"pools: expected names among"),
    ]:
        with pytest.raises(error, match=text):
            call()
    for a, b in zip(before, (pool.sums, pool.mins, pool.counts, pool.scores), strict=True):
        assert torch.equal(a, b)
