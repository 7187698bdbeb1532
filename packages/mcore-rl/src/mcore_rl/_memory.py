# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""One device for trainer and engine: what each gives up while the other works."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

from mcore_rl._stability import experimental_api

if TYPE_CHECKING:
    from mcore_rl._critic import Critic


@runtime_checkable
class _HostState(Protocol):
    """An optimizer whose state can move to the host."""

    def offload_to_cpu(self) -> None: ...
    def restore_from_cpu(self) -> None: ...


@runtime_checkable
class _GradBuffers(Protocol):
    """A gradient sync whose buffers can be given back."""

    def offload_grad_buffers(self) -> None: ...
    def restore_grad_buffers(self) -> None: ...


class _ShareOfState(Protocol):
    """An optimizer of whose state a share can stay on the device."""

    def offload_to_cpu(self, keep_bytes: int) -> None: ...


@runtime_checkable
class _Suspendable(Protocol):
    """An engine whose cache can be given back."""

    @property
    def is_suspended(self) -> bool: ...
    def suspend(self) -> None: ...
    def resume(self) -> None: ...


@runtime_checkable
class _SharesProcess(Protocol):
    """An engine that leaves to its process what torch keeps for later tensors."""

    def suspend_within_process(self) -> None: ...


_NEEDS = (
    ("offload_optimizer", "optimizer", _HostState, "offload_to_cpu and restore_from_cpu"),
    ("stream_optimizer", "optimizer", _HostState, "offload_to_cpu and restore_from_cpu"),
    ("release_gradients", "sync", _GradBuffers, "offload_grad_buffers and restore_grad_buffers"),
    ("suspend_engine", "engine", _Suspendable, "suspend, resume and is_suspended"),
)


@experimental_api
@dataclass(frozen=True, kw_only=True)
class MemorySwitch:
    """What trainer and engine of one device give up while the other one works; by default nothing.

    The critic of PPO is a part of the trainer: the state of its optimizer and its gradients go as the policy's do.

    Example:
        >>> switch = MemorySwitch(offload_optimizer=True, suspend_engine=True)
        >>> with switch.generating(optimizer=optimizer, sync=sync, engine=engine):
        ...     answers = engine.generate(prompts)
    """

    offload_optimizer: bool = False
    """The optimizer's state is in host memory during generation, page-locked; it comes back beside forward and backward passes."""
    stream_optimizer: bool = False
    """It stays in host memory, and each update streams it through the device: for models whose state has no room beside the weights of
    trainer and engine. An update then takes at least the time of the copies, about 1 s for 50 GB."""
    resident_gb: float = 0.0
    """Of the policy's optimizer state, so many GiB stay on the device all the time: what has room there beside all models, the engine's
    cache and the gradients. The rest, and all of the critic's, moves or streams as the two fields above say."""
    release_gradients: bool = False
    """The gradient buffers have no memory during generation, between whose steps they hold nothing. They may come back at other addresses:
    layers that run from CUDA graphs are captured anew then."""
    suspend_engine: bool = False
    """The engine has no cache during training; it keeps its weights and, on NVIDIA's driver, its recorded graphs."""

    def __post_init__(self) -> None:
        if self.offload_optimizer and self.stream_optimizer:
            raise ValueError(
                "offload_optimizer=True brings the state back for training, and stream_optimizer=True leaves it in host memory; "
                "set one of them"
            )
        if not (math.isfinite(self.resident_gb) and self.resident_gb >= 0):
            raise ValueError(f"resident_gb={self.resident_gb} must be a finite number of at least 0")
        if self.resident_gb and not (self.offload_optimizer or self.stream_optimizer):
            raise ValueError(
                f"resident_gb={self.resident_gb} is what stays of a state that leaves; set offload_optimizer or stream_optimizer, or 0"
            )

    def check(self, *, optimizer: object, sync: object, engine: object, critic: "Critic | None" = None) -> None:
        """See that each part can do what is asked of it; arguments as of ``generating``.

        Raises:
            ValueError: one cannot; names it.
        """
        owners: dict[str, dict[str, object]] = {"": {"optimizer": optimizer, "sync": sync, "engine": engine}}
        if critic is not None:
            owners["critic's "] = {"optimizer": critic.optimizer, "sync": critic.sync}
        for owner, parts in owners.items():
            for field, name, protocol, methods in _NEEDS:
                if getattr(self, field) and name in parts and not isinstance(parts[name], protocol):
                    kind = type(parts[name]).__name__
                    raise ValueError(f"{field}=True needs {methods}, and the {owner}{name} is a {kind}; set {field}=False")

    def training(self, engine: object) -> None:
        """Suspend the engine, if it is to be: the state before and after a block of ``generating``."""
        if self.suspend_engine:
            _suspend(engine)

    @contextlib.contextmanager
    def generating(self, *, optimizer: object, sync: object, engine: object, critic: "Critic | None" = None) -> Iterator[None]:
        """A block in which the engine generates and nothing trains. Afterwards, and when it raises, the trainer has its memory again
        and the engine is suspended. Blocks do not nest.

        Args:
            optimizer: of the policy, between two steps.
            sync: of its gradients.
            engine: of this device.
            critic: of PPO, between two steps.

        Raises:
            ValueError: as of ``check``.
            RuntimeError: the engine is not suspended: ``training`` was not called, or this is a block inside a block.
            torch.OutOfMemoryError: the engine does not fit; the trainer has its memory again.
        """
        self.check(optimizer=optimizer, sync=sync, engine=engine, critic=critic)
        if self.suspend_engine and not cast(_Suspendable, engine).is_suspended:
            raise RuntimeError("the engine is not suspended; call training(engine) before the first block, and do not nest blocks")
        trained = [(optimizer, sync, int(self.resident_gb * 2**30)), *([] if critic is None else [(critic.optimizer, critic.sync, 0)])]
        with contextlib.ExitStack() as stack:
            # In the reverse order at the end: the engine goes before the others come back.
            for state, _, keep_bytes in trained:
                self._move(stack, state, keep_bytes)
            if self.release_gradients:
                for _, gradients, _ in trained:
                    stack.callback(cast(_GradBuffers, gradients).restore_grad_buffers)
                    cast(_GradBuffers, gradients).offload_grad_buffers()
            if self.suspend_engine:
                stack.callback(_suspend, engine)
                cast(_Suspendable, engine).resume()
            yield

    def _move(self, stack: contextlib.ExitStack, optimizer: object, keep_bytes: int) -> None:
        """The state of an optimizer to the host; the stack brings it back if it is to come."""
        if self.offload_optimizer:
            stack.callback(cast(_HostState, optimizer).restore_from_cpu)
        if keep_bytes:
            cast(_ShareOfState, optimizer).offload_to_cpu(keep_bytes=keep_bytes)
        elif self.offload_optimizer or self.stream_optimizer:
            cast(_HostState, optimizer).offload_to_cpu()


def _suspend(engine: object) -> None:
    if isinstance(engine, _SharesProcess):
        # The trainer is in this process, and takes the memory at once.
        engine.suspend_within_process()
    else:
        cast(_Suspendable, engine).suspend()
