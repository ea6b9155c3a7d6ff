"""Every op as a torch op: schemas, opcheck, torch.compile, and the errors of the public layer; for every backend here."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from separability_cases import ALL_POOLS, edge_batch
from torch._dynamo.testing import CompileCounter

import speceyes_kernels as sk
from speceyes_kernels._backends import ops
from speceyes_kernels._schemas import SEPARABILITY_SCHEMAS

LOGITS = torch.zeros(3, 100)
NAMESPACES = {"reference": "speceyes_reference", "cpu": "speceyes"}


def op_calls(backend: str):
    """One call of every op, small and on the CPU: name -> arguments."""
    x = edge_batch(96, torch.float32)
    n, k, p = x.shape[0], 16, [0, 1, 2, 3, 4]
    f, i = lambda *s: torch.zeros(s), lambda *s: torch.zeros(s, dtype=torch.int64)
    count = torch.zeros(n, dtype=torch.int32)
    score = (k, 90, False, 1e-6, 8)
    state = lambda: (torch.zeros(3, 2, dtype=torch.float64), f(3, 2), torch.zeros(3, 2, dtype=torch.int32), f(3, 9))  # noqa: E731
    slots = torch.arange(n) % 4 - 1
    cu = torch.tensor([0, 5, 5, n])
    keep = torch.arange(n) % 3 > 0
    return {
        "topk_stats": (x, k, 90, f(n), i(n), f(n), f(n), f(n), count),
        "token_separability": (x, *score, f(n)),
        "answer_separability": (x, cu, keep, *score, p, 0.2, False, f(n, 2), f(5, 3)),
        "pool_update": (x, slots, keep, *score, *state(), f(n, 2)),
        "pool_update_scores": (f(n), None, slots, None, *state()),
        "pool_read": (*state(), None, p, 0.2, True, f(5, 3)),
        "partial_topk": (x, k, 90, 1000, f(n, k), i(n), f(n)),
        "merge_partials": (f(2, n, k), i(2, n), f(2, n), True, 1e-6, 8, f(n), i(n), f(n), f(n), f(n), count, f(n)),
    }


@pytest.mark.parametrize("backend", list(NAMESPACES))
def test_schemas_are_the_contract(backend):
    table = ops(backend)
    for name, schema in SEPARABILITY_SCHEMAS.items():
        ours = torch._C.parse_schema(f"{NAMESPACES[backend]}::{name}{schema}")
        assert str(getattr(table, name)._schema) == str(ours)


@pytest.mark.parametrize("name", list(SEPARABILITY_SCHEMAS))
@pytest.mark.parametrize("backend", list(NAMESPACES))
def test_opcheck(backend, name):
    torch.library.opcheck(getattr(ops(backend), name), op_calls(backend)[name])


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_compile_fullgraph_gives_the_same(backend):
    x = edge_batch(96, torch.float32)
    cu = torch.tensor([0, 4, x.shape[0]])
    slots = torch.arange(x.shape[0]) % 3

    def everything(x, cu, slots):
        pool = sk.SeparabilityPool(3, max_tokens=20, pools=ALL_POOLS, backend=backend)
        records = pool.update(x, slots)
        parts = [sk.partial_topk(x[:, :50], offset=0, backend=backend), sk.partial_topk(x[:, 50:], offset=50)]
        return (
            *sk.topk_stats(x, backend=backend),
            sk.token_separability(x, backend=backend),
            sk.answer_separability(x, cu, pool=ALL_POOLS, backend=backend),
            records,
            pool.read(),
            *sk.merge_partials(parts, backend=backend),
            sk.accept(sk.token_separability(x, backend=backend), 0.98),
        )

    eager = everything(x, cu, slots)
    compiled = torch.compile(everything, fullgraph=True)(x, cu, slots)
    for a, b in zip(eager, compiled, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_one_dynamic_graph_takes_every_vocabulary(backend):
    """`valid_vocab` is a symbolic size: no recompilation a value, nor a width."""
    x, cu = edge_batch(300, torch.float32), torch.tensor([0, 4, 9])

    def everything(x, cu, valid):
        pool = sk.SeparabilityPool(2, max_tokens=9, k=8, backend=backend)
        return (
            *sk.topk_stats(x, 8, valid_vocab=valid, backend=backend),
            sk.token_separability(x, 8, valid_vocab=valid, backend=backend),
            *sk.answer_separability(x, cu, 8, pool=("min", "log"), valid_vocab=valid, backend=backend),
            *sk.partial_topk(x, 8, offset=20, valid_vocab=valid, backend=backend),
            pool.update(x[:, :valid], cu[:1].expand(x.shape[0])),
        )

    compiler = CompileCounter()
    compiled = torch.compile(everything, fullgraph=True, dynamic=True, backend=compiler)
    for rows, width, valid in [(9, 300, 200), (9, 300, 250), (9, 300, 64), (9, 280, 279), (9, 290, 100)]:
        part = x[:rows, :width].clone()
        for a, b in zip(compiled(part, cu, valid), everything(part, cu, valid), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert compiler.frame_count == 1


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_first_call_of_a_process_may_be_compiled(backend):
    """Nothing is loaded yet: the loaders must stay out of the trace."""
    code = (
        "import torch, speceyes_kernels as sk\n"
        f"f = torch.compile(lambda x: sk.token_separability(x, backend={backend!r}), fullgraph=True, backend='eager')\n"
        "x = torch.randn(2, 100)\n"
        f"assert torch.equal(f(x), sk.token_separability(x, backend={backend!r}))\n"
    )
    subprocess.run([sys.executable, "-W", "error::RuntimeWarning", "-c", code], check=True)


def test_no_gradient_flows_and_inference_mode_is_no_trap():
    x = torch.randn(4, 100, requires_grad=True)
    for backend in ("auto", "reference"):
        assert not sk.token_separability(x, backend=backend).requires_grad
        with torch.inference_mode():
            pool = sk.SeparabilityPool(2, max_tokens=4, backend=backend)
            pool.update(x, torch.tensor([0, 1, 0, -1]))
        inside = pool.read()
        pool.reset()
        pool.update(x, torch.tensor([0, 1, 0, -1]))
        assert torch.equal(pool.read(), inside)


def test_numbers_of_numpy_are_numbers():
    x = torch.randn(4, 100)
    same = sk.token_separability(x, np.int64(16), eps=np.float32(1e-6), valid_vocab=np.int32(90))
    assert torch.equal(same, sk.token_separability(x, 16, eps=float(np.float32(1e-6)), valid_vocab=90))


def test_out_is_filled_and_returned():
    x = edge_batch(96, torch.float32)
    out = torch.empty(x.shape[0])
    assert sk.token_separability(x, out=out) is out
    assert torch.equal(out, sk.token_separability(x))
    want = sk.topk_stats(x)
    given = tuple(torch.empty_like(t) for t in want)
    got = sk.topk_stats(x, out=given)
    assert isinstance(got, sk.TopkStats) and all(a is b for a, b in zip(got, given, strict=True))
    for a, b in zip(given, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_backend_of_another_device_is_refused(monkeypatch):
    from speceyes_kernels import _backends

    monkeypatch.setattr(_backends, "_loaded", {**_backends._loaded, "cuda": _backends.ops("cpu")})
    monkeypatch.setattr(_backends, "_chosen", {})
    with pytest.raises(ValueError, match="backend 'cuda': expected tensors on 'cuda', got 'cpu'"):
        sk.topk_stats(LOGITS, backend="cuda")
    with pytest.raises(ValueError, match="backend 'cpu': expected tensors on 'cpu', got 'meta'"):
        sk.topk_stats(LOGITS.to("meta"), backend="cpu")


def test_short_way_gives_what_the_full_checks_give(monkeypatch):
    from speceyes_kernels import _backends

    x, slots = edge_batch(96, torch.float32), torch.arange(edge_batch(96, torch.float32).shape[0]) % 4 - 1
    cu, keep = torch.tensor([0, 5, 5, len(slots)]), slots % 2 == 0
    plain = [torch.tensor([0, *range(5, len(slots), 5), len(slots)]), None]

    def everything():
        pool = sk.SeparabilityPool(3, max_tokens=90, pools=ALL_POOLS, valid_vocab=90)
        outs = torch.empty(5, 3), torch.empty(3)
        return [
            sk.token_separability(x, out=torch.empty(len(x))),
            sk.answer_separability(x, cu, 16, pool=ALL_POOLS, token_mask=keep, form="include_top1", valid_vocab=90),
            sk.answer_separability(x, cu, pool=ALL_POOLS, bottom_share=0.5, bottom_rounding="ceil", out=outs[0]),
            sk.answer_separability(x, cu, pool="log", out=outs[1]),
            sk.answer_separability(x, plain[0], pool="bottom", token_mask=plain[1]),
            sk.answer_separability(x, cu.flip(0).flip(0).int(), pool=["mean", "min"]),
            sk.answer_separability(x, cu.repeat_interleave(2)[::2], token_mask=keep.repeat_interleave(2)[::2]),
            pool.update(x, slots, keep),
            pool.update(x, slots.repeat_interleave(2)[::2]),
            pool.read(),
            *outs,
        ]

    short = everything()
    assert short[2] is short[-2] and short[3] is short[-1]

    class Nothing(dict):
        def __setitem__(self, key, value): ...

    monkeypatch.setattr(_backends, "decode_ops", Nothing())
    for a, b in zip(short, everything(), strict=True):
        assert a.shape == b.shape and torch.equal(a.nan_to_num(7), b.nan_to_num(7))


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_no_rows(backend):
    empty = LOGITS[:0]
    assert all(t.shape == (0,) for t in sk.topk_stats(empty, backend=backend))
    assert sk.token_separability(empty, backend=backend).shape == (0,)
    out = sk.answer_separability(empty, torch.tensor([0, 0, 0]), pool=ALL_POOLS, backend=backend)
    assert out.tolist() == [[-math.inf] * 2] * 5
    assert sk.answer_separability(empty, torch.tensor([0]), backend=backend).shape == (0,)
    pool = sk.SeparabilityPool(2, max_tokens=3, backend=backend)
    assert pool.update(empty, torch.zeros(0, dtype=torch.int32)).shape == (0, 2)
    part = sk.partial_topk(empty, offset=0, backend=backend)
    assert sk.merge_partials([part], backend=backend).top1.shape == (0,)


def test_unavailable_backend_says_why_and_auto_falls_back(monkeypatch):
    from speceyes_kernels import _backends

    monkeypatch.setattr(_backends, "_loaded", {})
    monkeypatch.setattr(_backends, "_failed", {})
    monkeypatch.setattr(_backends, "_chosen", {})

    def broken():
        raise OSError("undefined symbol: planted")

    monkeypatch.setitem(_backends._LOADERS, "cpu", broken)
    with pytest.raises(sk.BackendUnavailable, match="'cpu' cannot load.*undefined symbol: planted") as caught:
        sk.topk_stats(LOGITS, backend="cpu")
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(sk.BackendUnavailable) as again:
        sk.topk_stats(LOGITS, backend="cpu")
    assert again.value is not caught.value and again.value.__cause__ is caught.value.__cause__
    assert "cpu" not in sk.available_backends() and "planted" in sk.unavailable_reason("cpu")
    with pytest.warns(RuntimeWarning, match="falls back to its slow reference backend.*planted"):
        sk.topk_stats(LOGITS)
