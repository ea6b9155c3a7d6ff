"""Bounds and race checks for kernels in Triton's interpreter (``TRITON_INTERPRET=1``).

The interpreter runs one program after another, each operation for the whole program at once, on raw addresses: it finds
neither overruns nor races. Inside ``with guard():`` every load and store is checked:

* bounds: an address must lie in the tensor whose pointer it was computed from (provenance, not just "some tensor");
* between programs: two that touch an element, one of them storing, must be ordered by atomics (release, then acquire);
* within a program: lanes exchange data through memory only across ``tl.debug_barrier()``; a release comes after one;
* no store names one address twice.

Programs run in an order drawn from ``seed`` (None: ascending). Nested device functions also run faster in here: the
language is patched once a launch and not at every call.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interp
from triton._C.libtriton import ir

_SEM = ir.MEM_SEMANTIC
_POINTER_OPS = ("create_addptr", "create_broadcast", "create_splat", "create_expand_dims", "create_reshape")


class Fault(Exception):
    """An access that a GPU could punish."""


class _Region:
    """What one tensor argument may touch, and its storage's shadow."""

    def __init__(self, tensor, shadow: _Shadow) -> None:
        self.size = tensor.element_size()
        self.low = tensor.data_ptr()
        span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1 if tensor.numel() else 0
        self.high = self.low + span * self.size
        self.shape = tuple(tensor.shape)
        self.shadow = shadow


class _Shadow:
    """Who last wrote and read each byte of a storage, and in which barrier interval."""

    def __init__(self, base: int, size: int) -> None:
        self.base = base
        self.writer, self.reader = np.full(size, -1, np.int64), np.full(size, -1, np.int64)
        self.write_epoch, self.read_epoch = np.zeros(size, np.int64), np.zeros(size, np.int64)


_MANY = -2


class Guard:
    """State of one ``with guard():``; ``bytes_read`` maps a tensor's ``data_ptr()`` to the bytes loaded through it."""

    def __init__(self, seed: int | None) -> None:
        self.seed, self.fault, self.launches = seed, None, 0
        self.bytes_read: dict[int, int] = defaultdict(int)
        self._new_launch()

    def _new_launch(self) -> None:
        self.shadows: dict[int, _Shadow] = {}
        self.program, self.epoch = -1, 0
        self.stored_in_epoch = False
        self.known: dict[int, set[int]] = defaultdict(set)  # program -> programs whose stores it may read
        self.released: dict[int, set[int]] = defaultdict(set)  # address -> programs that released there
        self.launches += 1

    def region(self, tensor) -> _Region:
        storage = tensor.untyped_storage()
        base = storage.data_ptr()
        if base not in self.shadows:
            self.shadows[base] = _Shadow(base, storage.nbytes())
        return _Region(tensor, self.shadows[base])

    def fail(self, text: str) -> None:
        self.fault = Fault(f"{text} (program {self.program} of launch {self.launches})")
        raise self.fault

    def start_program(self, index: int) -> None:
        self.program, self.epoch, self.stored_in_epoch = index, self.epoch + 1, False

    def barrier(self) -> None:
        self.epoch, self.stored_in_epoch = self.epoch + 1, False

    def _at(self, ptrs, mask, what: str) -> tuple[_Region, np.ndarray]:
        region = ptrs.attr.get("region")
        if region is None:
            self.fail(f"{what}: a pointer of unknown origin")
        active = np.broadcast_to(np.asarray(mask.data), ptrs.data.shape).astype(bool)
        address = np.asarray(ptrs.data)[active].reshape(-1).astype(np.int64)
        outside = (address < region.low) | (address + region.size > region.high)
        if outside.any():
            off = (address[outside][0] - region.low) // region.size
            self.fail(f"{what}: {outside.sum()} of {address.size} lanes out of bounds, element {off} of {region.shape}")
        return region, address - region.shadow.base

    def _unordered(self, others: np.ndarray) -> np.ndarray:
        foreign = (others != -1) & (others != self.program)
        if not foreign.any():
            return foreign
        return foreign & ~np.isin(others, list(self.known[self.program]))

    def load(self, ptrs, mask) -> None:
        region, at = self._at(ptrs, mask, "load")
        s = region.shadow
        self.bytes_read[region.low] += at.size * region.size
        wrong = self._unordered(s.writer[at])
        if wrong.any():
            self.fail(f"race: load of what program {s.writer[at][wrong][0]} stored, without an atomic between them")
        if ((s.writer[at] == self.program) & (s.write_epoch[at] == self.epoch)).any():
            self.fail("race: load of what this program stored, without a barrier between them")
        reader = s.reader[at]
        s.reader[at] = np.where((reader == -1) | (reader == self.program), self.program, _MANY)
        s.read_epoch[at] = self.epoch

    def store(self, ptrs, mask) -> None:
        region, at = self._at(ptrs, mask, "store")
        s = region.shadow
        if np.unique(at).size != at.size:
            self.fail("race: two lanes of one store name the same address")
        for who, epoch, verb in ((s.writer, s.write_epoch, "stored"), (s.reader, s.read_epoch, "loaded")):
            wrong = self._unordered(who[at])
            if wrong.any():
                self.fail(f"race: store to what program {who[at][wrong][0]} {verb}, without an atomic between them")
            if ((who[at] == self.program) & (epoch[at] == self.epoch)).any():
                self.fail(f"race: store to what this program {verb}, without a barrier between them")
        s.writer[at], s.write_epoch[at] = self.program, self.epoch
        self.stored_in_epoch |= at.size > 0

    def atomic(self, ptrs, mask, semantics: object) -> None:
        sem = {_SEM.RELAXED: "", _SEM.ACQUIRE: "a", _SEM.RELEASE: "r", _SEM.ACQUIRE_RELEASE: "ar"}[semantics]
        region, at = self._at(ptrs, mask, "atomic")
        for address in (at + region.shadow.base).tolist():
            if "a" in sem:
                self.known[self.program] |= self.released[address]
            if "r" in sem:
                if self.stored_in_epoch:
                    self.fail("race: release of stores that no barrier separates from it")
                self.released[address] |= {self.program} | self.known[self.program]


@contextlib.contextmanager
def guard(seed: int | None = None) -> Iterator[Guard]:
    g = Guard(seed)
    builder = interp.interpreter_builder
    kept: list[tuple[object, str, object]] = []

    def patch(owner, name: str, make) -> None:
        old = getattr(owner, name)
        kept.append((owner, name, owner.__dict__.get(name, kept)))
        setattr(owner, name, make(old))

    def with_region(old):
        def call(ptr, *args, **kwargs):
            out = old(ptr, *args, **kwargs)
            source = ptr if isinstance(ptr, interp.TensorHandle) else args[0]  # splat takes the type first
            if isinstance(source, interp.TensorHandle) and "region" in source.attr:
                out.attr["region"] = source.attr["region"]
            return out

        return call

    for name in _POINTER_OPS:
        if hasattr(builder, name):
            patch(builder, name, with_region)

    def checked(check):
        def make(old):
            def call(*args):
                check(*args)
                return old(*args)

            return call

        return make

    patch(builder, "create_masked_load", checked(lambda ptrs, mask, *_: g.load(ptrs, mask)))
    patch(builder, "create_masked_store", checked(lambda ptrs, value, mask, *_: g.store(ptrs, mask)))
    patch(builder, "create_atomic_rmw", checked(lambda op, ptrs, value, mask, sem, *_: g.atomic(ptrs, mask, sem)))

    def no_cas(old):
        return lambda *args: g.fail("atomic_cas: this guard does not know it")

    patch(builder, "create_atomic_cas", no_cas)
    patch(builder, "create_barrier", lambda old: lambda *args: g.barrier())

    def converted(old):
        def call(arg):
            out = old(arg)
            if hasattr(arg, "data_ptr"):
                out.handle.attr["region"] = g.region(arg)
            return out

        return call

    patch(interp, "_implicit_cvt", converted)

    order = SimpleNamespace(of=None, dim=(1, 1, 1))

    def grid_dim(old):
        def call(x, y, z):
            order.dim = (x, y, z)
            n = x * y * z
            order.of = np.arange(n) if g.seed is None else np.random.default_rng(g.seed + g.launches).permutation(n)
            old(x, y, z)

        return call

    def grid_idx(old):
        def call(x, y, z):
            _, ny, nz = order.dim
            index = int(order.of[(x * ny + y) * nz + z])
            g.start_program(index)
            old(index // (ny * nz), index // nz % ny, index % nz)

        return call

    patch(builder, "set_grid_dim", grid_dim)
    patch(builder, "set_grid_idx", grid_idx)

    running = SimpleNamespace(depth=0)

    def patch_once(old):
        def call(fn):
            if running.depth:
                return SimpleNamespace(restore=lambda: None)
            scope = old(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
            running.depth, restore = 1, scope.restore

            def leave():
                running.depth = 0
                restore()

            return SimpleNamespace(restore=leave)

        return call

    patch(interp, "_patch_lang", patch_once)

    def launch(old):
        def call(self, *args, **kwargs):
            g._new_launch()
            return old(self, *args, **kwargs)

        return call

    patch(interp.GridExecutor, "__call__", launch)
    try:
        yield g
    except Exception:
        if g.fault is not None:
            raise g.fault from None
        raise
    finally:
        for owner, name, old in reversed(kept):
            if old is kept:  # was not the owner's own attribute
                delattr(owner, name)
            else:
                setattr(owner, name, old)
