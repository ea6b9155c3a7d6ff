"""Input checks of the public ops: what was given, what was expected, what to do; before anything is changed."""

from __future__ import annotations

import itertools
import numbers
import operator
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ._schemas import POOL_IDS

MAX_K = 256
MAX_VOCAB = 1 << 20
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FORMS = {"exclude_top1": False, "include_top1": True}


def describe(x: object) -> str:
    if isinstance(x, Tensor):
        return f"a {x.dim()}-D {str(x.dtype).removeprefix('torch.')} tensor of shape {tuple(x.shape)} on {x.device}"
    return f"{type(x).__name__} {x!r}"[:120]


def check_dense(tensor: Tensor, name: str) -> None:
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise TypeError(f"{name}: expected a dense tensor, got layout {tensor.layout}; call .to_dense()")


def as_array(value: object, name: str) -> np.ndarray:
    """A numpy array of a tensor's values (copied to the CPU; bfloat16 as float32), an array's or nested lists'."""
    if isinstance(value, Tensor):
        check_dense(value, name)
        if value.is_meta:
            raise ValueError(f"{name}: expected a tensor with values, got {describe(value)}")
        value = value.detach().cpu()
        return (value.float() if value.dtype is torch.bfloat16 else value).numpy()
    try:
        return np.asarray(value)
    except ValueError as error:
        raise ValueError(f"{name}: expected an array or lists of one length, got {describe(value)} ({error})") from None


def check_logits(logits: Tensor, name: str = "logits") -> None:
    if not isinstance(logits, Tensor):
        raise TypeError(f"{name}: expected a 2-D float tensor, got {describe(logits)}; pass a torch.Tensor")
    if logits.dtype not in _DTYPES:
        raise TypeError(
            f"{name}: expected a 2-D float tensor, got {describe(logits)}; convert to float32, float16 or bfloat16"
        )
    check_dense(logits, name)
    if logits.dim() != 2:
        raise ValueError(f"{name}: expected a 2-D float tensor, got {describe(logits)}; use shape [rows, vocabulary]")
    if logits.shape[1] > MAX_VOCAB:
        raise ValueError(
            f"{name}: expected at most {MAX_VOCAB} columns, got {logits.shape[1]}; use partial_topk shards"
        )


def as_int(value: object, name: str, expected: str) -> int:
    """An int from whatever is one (numpy's too); bool and float are refused."""
    if type(value) is int:
        return value
    if isinstance(value, bool | Tensor) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: expected {expected}, got {describe(value)}")
    return operator.index(value)


def as_number(value: object, name: str, expected: str) -> float:
    """A float from a real number; tensors (reading one may synchronise), bool and text are refused."""
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected {expected}, got {describe(value)}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name}: expected {expected}, got an integer that no float holds") from None


def as_device(device: object) -> torch.device:
    """The device as tensors report it ("cuda" -> "cuda:0"); it must be there."""
    if (device is not None and not isinstance(device, torch.device | str | int)) or isinstance(device, bool):
        raise TypeError(f"device: expected a torch.device or its name, got {describe(device)}")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # no such name, no such device, a torch without it
        raise ValueError(f"device: expected one that is here, got {device!r} ({error})") from error


def check_scores(score: Tensor) -> None:
    """Refuses what is no tensor of real numbers."""
    check_dense(score, "score")
    if score.is_complex() or score.dtype is torch.bool:
        raise TypeError(f"score: expected a tensor of real numbers, got {describe(score)}")


def check_k(k: int) -> int:
    k = as_int(k, "k", f"an int in 2..{MAX_K}")
    if not 2 <= k <= MAX_K:
        raise ValueError(f"k: expected an int in 2..{MAX_K}, got {k}")
    return k


def check_vocab(logits: Tensor, k: int, valid_vocab: int | None) -> int:
    width = logits.shape[1]
    if valid_vocab is None:
        valid_vocab = width
    else:
        valid_vocab = as_int(valid_vocab, "valid_vocab", "None or an int")
        if not 1 <= valid_vocab <= width:
            raise ValueError(f"valid_vocab: expected 1..{width} (the columns of logits), got {valid_vocab}")
    if k > valid_vocab:
        raise ValueError(f"k: expected at most the valid vocabulary ({valid_vocab}), got {k}; lower k")
    return valid_vocab


def check_score(form: str, eps: float, min_competitors: int) -> tuple[bool, float, int]:
    include_top1 = FORMS.get(form) if isinstance(form, str) else None
    if include_top1 is None:
        raise ValueError(f"form: expected 'exclude_top1' or 'include_top1', got {form!r}")
    eps = as_number(eps, "eps", "a number in 1e-37..1e37")
    if not 1e-37 <= eps <= 1e37:  # a normal float32: smaller ones flush to 0, and 0 / 0 is no score
        raise ValueError(f"eps: expected a number in 1e-37..1e37, got {eps!r}")
    min_competitors = as_int(min_competitors, "min_competitors", "an int >= 1")
    if min_competitors < 1:
        raise ValueError(f"min_competitors: expected an int >= 1, got {min_competitors}")
    return include_top1, eps, min(min_competitors, MAX_K)


def check_out(out: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, name: str = "out") -> None:
    if not isinstance(out, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {describe(out)}")
    if out.dtype is not dtype:
        raise TypeError(f"{name}: expected dtype {dtype}, got {describe(out)}")
    check_dense(out, name)
    if out.shape != shape or out.device != device or not out.is_contiguous():
        raise ValueError(
            f"{name}: expected a contiguous tensor of shape {shape} on {device}, got {describe(out)}"
            + ("" if out.is_contiguous() else " (not contiguous)")
        )
    if out.requires_grad:
        raise ValueError(f"{name}: expected a tensor without requires_grad, got one with it; the ops have no gradient")


def _reach(tensor: Tensor, begin: int, end: int) -> bool:
    """Whether bytes begin..end - 1 hold elements of a tensor; exact but for gaps within a run of its inner dimension."""
    dims = sorted(zip(tensor.stride(), tensor.shape, strict=True), reverse=True)
    size = tensor.element_size()
    low, high = begin - tensor.data_ptr(), end - tensor.data_ptr()
    (step, runs), inner = (dims[0], dims[1:]) if dims else ((0, 1), [])
    step *= size
    length = sum(stride * (n - 1) for stride, n in inner) * size + size
    # The first run that ends after the bytes begin must not begin before they end.
    run = 0 if low < length else runs if step == 0 else (low - length) // step + 1
    return run < runs and run * step < high


def _address(tensor: Tensor | None) -> int | None:
    """Where a tensor's elements begin; None when it has no memory of its own to look at (meta, fake, functional)."""
    if tensor is None or tensor.is_meta or not tensor.numel():
        return None
    try:
        return tensor.data_ptr()
    except RuntimeError:  # torch's answer for tensors without storage
        return None


def check_apart(written: dict[str, Tensor], read: dict[str, Tensor | None]) -> None:
    """Refuses outputs (contiguous) that share memory with each other or with an input."""
    if torch.compiler.is_compiling():  # traced tensors have no memory
        return
    seen = dict(read)
    for name, out in written.items():
        begin = _address(out)
        if begin is not None:
            end = begin + out.numel() * out.element_size()
            for other_name, other in seen.items():
                if other is None or _address(other) is None or other.device != out.device:
                    continue
                if _reach(other, begin, end):
                    raise ValueError(
                        f"{name}: expected memory of its own, got a tensor that shares memory with {other_name}; "
                        "pass a fresh one"
                    )
        seen[name] = out


def check_mask(mask: Tensor | None, rows: int, device: torch.device, name: str) -> None:
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
        raise TypeError(f"{name}: expected a bool tensor of shape ({rows},), got {describe(mask)}")
    check_dense(mask, name)
    if mask.shape != (rows,) or mask.device != device:
        raise ValueError(f"{name}: expected a bool tensor of shape ({rows},) on {device}, got {describe(mask)}")


def check_pools(pools: str | Sequence[str], name: str = "pool") -> list[int]:
    if not isinstance(pools, str | list | tuple):
        raise TypeError(f"{name}: expected a name or a list or tuple of names, got {describe(pools)}")
    names = (pools,) if isinstance(pools, str) else tuple(pools)
    known = ", ".join(map(repr, POOL_IDS))
    if not names:
        raise ValueError(f"{name}: expected at least one of {known}, got none")
    for p in names:
        if not isinstance(p, str) or p not in POOL_IDS:
            raise ValueError(f"{name}: expected names among {known}, got {p!r}")
    if len(set(names)) != len(names):
        raise ValueError(f"{name}: expected each name once, got {names!r}")
    return [POOL_IDS[p] for p in names]


#: Every right spelling of the pools but lists -> their numbers: the 5 names and the 325 tuples of them.
_POOL_SETS: dict[str | tuple[str, ...], list[int]] = {name: [number] for name, number in POOL_IDS.items()}
_POOL_SETS |= {
    names: [POOL_IDS[name] for name in names]
    for length in range(1, len(POOL_IDS) + 1)
    for names in itertools.permutations(POOL_IDS, length)
}


def pool_ids(pools: object) -> list[int] | None:
    """What `check_pools` gives, by one look-up (not to be changed); None: ask `check_pools`."""
    if type(pools) is not str and type(pools) is not tuple:
        return None
    try:
        return _POOL_SETS.get(pools)
    except TypeError:  # a tuple that cannot be hashed
        return None


def plain_score(form: object, eps: object, min_competitors: object) -> bool:
    """Whether the native ops take these arguments of a score as they are."""
    return (
        type(eps) is float
        and 1e-37 <= eps <= 1e37
        and type(min_competitors) is int
        and 1 <= min_competitors <= MAX_K
        and type(form) is str
        and form in FORMS
    )


def check_bottom(share: float, rounding: str) -> bool:
    share = as_number(share, "bottom_share", "a number in (0, 1]")
    if not 0.0 < share <= 1.0:
        raise ValueError(f"bottom_share: expected a number in (0, 1], got {share!r}")
    if rounding not in ("floor", "ceil"):
        raise ValueError(f"bottom_rounding: expected 'floor' or 'ceil', got {rounding!r}")
    return rounding == "ceil"


def readable(tensor: Tensor) -> bool:
    """Whether looking at the content is free: a real CPU tensor, not while tracing. Elsewhere the kernels guard."""
    return type(tensor) is Tensor and tensor.is_cpu and not torch.compiler.is_compiling()


def check_cu_seqlens(cu_seqlens: Tensor, rows: int, device: torch.device) -> None:
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens: expected an int32 or int64 tensor [answers + 1], got {describe(cu_seqlens)}")
    check_dense(cu_seqlens, "cu_seqlens")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1 or cu_seqlens.device != device:
        raise ValueError(
            f"cu_seqlens: expected a 1-D tensor of answers + 1 entries on {device}, got {describe(cu_seqlens)}"
        )
    # On a GPU the content stays unread (it would synchronise): the kernels clamp it to 0..rows.
    if readable(cu_seqlens):
        values = cu_seqlens.tolist()
        if values[0] != 0 or values[-1] != rows or any(a > b for a, b in itertools.pairwise(values)):
            raise ValueError(
                f"cu_seqlens: expected to rise from 0 to {rows} (the rows of logits), got {str(values)[:100]}"
            )
