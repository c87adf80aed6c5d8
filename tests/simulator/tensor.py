# SPDX-License-Identifier: Apache-2.0
"""Tensors of the simulated device: each operator is split into its shape, now, and its work, later on a stream."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.simulator.device import Lease, SimulatedDevice

DEVICE_TYPE = "simulated"

aten = torch.ops.aten
_ALLOCATE_ONLY = {aten.empty_like.default, aten.new_empty.default, aten.new_empty_strided.default}

_setup_lock = threading.Lock()
_library: torch.library.Library | None = None
_active: SimulatedDevice | None = None


def slot_taken_by() -> str | None:
    """Name of the out-of-tree accelerator that holds torch's PrivateUse1 slot, if it is not this simulator."""
    name = torch._C._get_privateuse1_backend_name()
    return None if name in ("privateuseone", DEVICE_TYPE) else name


def _set_up() -> torch.device:
    global _library
    with _setup_lock:
        if _library is None and slot_taken_by() is None:
            _setup_privateuseone_for_python_backend(DEVICE_TYPE)
            _library = torch.library.Library("aten", "IMPL")
            _library.impl("empty.memory_format", _empty, "PrivateUse1")
            _library.impl("empty_strided", _empty_strided, "PrivateUse1")
            _library.impl("_copy_from", _copy_from, "PrivateUse1")
            for overload in ("arange", "arange.start", "arange.start_step"):
                _library.impl(
                    overload, _arange(getattr(aten.arange, overload.partition(".")[2] or "default")), "PrivateUse1"
                )
    return torch.device(DEVICE_TYPE, 0) if slot_taken_by() is None else torch.device("meta")


def active() -> SimulatedDevice:
    assert _active is not None, "no simulated device is active"
    return _active


@contextmanager
def activate(device: SimulatedDevice) -> Iterator[SimulatedDevice]:
    """Make `device` the one that `torch.device("simulated")` means."""
    global _active
    assert _active is None, "a simulated device is active already"
    _active = device
    try:
        yield device
    finally:
        _active = None


class SimulatedTensor(torch.Tensor):
    """A tensor on the simulated device. Its memory is seen by queued work, and by `read`."""

    _lease: Lease

    @staticmethod
    def __new__(cls, lease: Lease, like: torch.Tensor) -> SimulatedTensor:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            like.size(),
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=DEVICE,
        )
        assert isinstance(tensor, cls)
        tensor._lease = lease
        return tensor

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"SimulatedTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    def record_stream(self, stream: Any) -> None:
        self._lease.block.users.add(stream)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _dispatch(func, args, kwargs or {})


def memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as a host tensor that does not keep them allocated: what a kernel's pointer sees."""
    assert isinstance(tensor, SimulatedTensor)
    raw = tensor._lease.block.raw
    return (
        raw[: raw.numel() // tensor.itemsize * tensor.itemsize]
        .view(tensor.dtype)
        .as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    )


def read(tensor: torch.Tensor) -> torch.Tensor:
    """What the thread's current stream sees in `tensor` once it has run all it has queued. Not a counted sync."""
    device = active()
    device.wait_for(device.current_stream)
    return memory(tensor).clone()


def _allocate(like: torch.Tensor) -> SimulatedTensor:
    """An unwritten tensor with the layout of `like`."""
    return SimulatedTensor(active().allocate(like.untyped_storage().nbytes()), like)


def _meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        offset = value.storage_offset()
        size = offset + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) + 1
        base = torch.empty(size if value.numel() else 0, dtype=value.dtype, device="meta")
        return base.as_strided(value.size(), value.stride(), offset)
    return torch.device("meta") if isinstance(value, torch.device) else value


def _kernel_argument(value: Any) -> Any:
    """What a launched kernel holds of an argument: an address of the device, or a host number's value."""
    if isinstance(value, SimulatedTensor):
        return memory(value)
    if isinstance(value, torch.Tensor):
        if value.dim():
            raise RuntimeError("expected all tensors to be on the simulated device, found one on the host")
        return value.clone()
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    written = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(kwargs[argument.name] if argument.name in kwargs else args[index])
    return written


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    device = active()
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        # Under inference mode torch hands over `to`, `flatten`, ... whole; their schemas claim views they may not be.
        return func.decompose(*args, **kwargs)
    to = kwargs.get("device")
    if to is not None and torch.device(to).type != DEVICE_TYPE:
        if func is not aten._to_copy.default:
            return func(*pytree.tree_map(_meta, args), **{**kwargs, "device": "meta"}).to_empty(device=to)
        device.host_sync("copy to the host")
        return func(memory(args[0]), **kwargs)
    if func is aten.copy_.default:
        return _copy(*args, **kwargs)
    if func is aten.record_stream.default:
        return args[0].record_stream(args[1])
    if func._schema.returns and not any("Tensor" in str(returned.type) for returned in func._schema.returns):
        device.host_sync(str(func))
        return func(*pytree.tree_map(_kernel_argument, args), **pytree.tree_map(_kernel_argument, kwargs))

    if any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):
        viewed = func(*pytree.tree_map(_meta, args), **pytree.tree_map(_meta, kwargs))
        # A view is an inference tensor only where its base is: torch shares the version counter.
        with torch.inference_mode(args[0].is_inference()):
            return pytree.tree_map_only(torch.Tensor, lambda view: SimulatedTensor(args[0]._lease, view), viewed)

    written = _written(func, args, kwargs)
    kernel_args, kernel_kwargs = pytree.tree_map(_kernel_argument, (args, kwargs))
    if written:
        device.submit(str(func), lambda: func(*kernel_args, **kernel_kwargs))
        return written[0] if len(func._schema.returns) == 1 else tuple(written[: len(func._schema.returns)])

    try:
        shaped = func(*pytree.tree_map(_meta, args), **pytree.tree_map(_meta, kwargs))
    except NotImplementedError:  # the shape depends on the data
        device.host_sync(str(func))
        found = func(*kernel_args, **kernel_kwargs)
        return pytree.tree_map_only(torch.Tensor, _launch_constant, found)
    outputs = pytree.tree_map_only(torch.Tensor, _allocate, shaped)
    if func in _ALLOCATE_ONLY:
        return outputs
    targets = [memory(leaf) for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, SimulatedTensor)]

    def compute() -> None:
        results = [
            leaf for leaf in pytree.tree_leaves(func(*kernel_args, **kernel_kwargs)) if isinstance(leaf, torch.Tensor)
        ]
        for target, result in zip(targets, results, strict=True):
            # Statistics that only training reads are empty on the host: they stay poison.
            if result.numel() or not target.numel():
                target.copy_(result)

    device.submit(str(func), compute)
    return outputs


def _copy(destination: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    device = active()
    if not isinstance(destination, SimulatedTensor):
        device.host_sync("copy to the host")
        return destination.copy_(memory(source))
    target = memory(destination)
    if isinstance(source, SimulatedTensor):
        origin = memory(source)
        device.submit("copy", lambda: target.copy_(origin))
        return destination
    pinned = device.pinned_alias(source)
    if non_blocking and pinned is not None:
        device.submit("upload", lambda: target.copy_(pinned))
        return destination
    staged = source.detach().clone()
    device.submit("upload", lambda: target.copy_(staged))
    device.host_sync("copy from pageable memory" if pinned is None else "blocking copy from pinned memory")
    return destination


def _launch_constant(value: torch.Tensor) -> SimulatedTensor:
    """A tensor that a kernel fills with values the host knows at launch."""
    output = _allocate(value)
    target = memory(output)
    active().submit("fill", lambda: target.copy_(value))
    return output


def _empty(
    size: Any,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> SimulatedTensor:
    return _allocate(
        torch.empty(size, dtype=dtype, device="meta", memory_format=memory_format or torch.contiguous_format)
    )


def _empty_strided(
    size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> SimulatedTensor:
    return _allocate(torch.empty_strided(size, stride, dtype=dtype, device="meta"))


def _copy_from(source: torch.Tensor, destination: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return _copy(destination, source, non_blocking)


def _arange(overload: Any) -> Any:
    def arange(*args: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None) -> Any:
        return _launch_constant(overload(*args, dtype=dtype, device="cpu"))

    return arange


DEVICE = _set_up()
