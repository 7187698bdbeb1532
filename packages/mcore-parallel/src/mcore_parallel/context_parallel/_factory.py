# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Chooses the attention core of a layout by name."""

from collections.abc import Sequence
from typing import TypeVar

from mcore_parallel.context_parallel._core import ContextParallelAttention, LayeredAttention
from mcore_parallel.context_parallel._tiles import Window
from mcore_parallel.groups import Group, ParallelPlan, ProcessGroups

CP_COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")
T = TypeVar("T")


def context_parallel_attention(
    groups: ProcessGroups,
    cp_comm_type: str | Sequence[str] = "p2p",
    *,
    window_size: Window | Sequence[Window | None] | None = None,
    causal: bool = True,
    softmax_type: str = "vanilla",
    softmax_scale: float | None = None,
    layers: range | None = None,
) -> ContextParallelAttention | LayeredAttention:
    """An attention core for models whose sequences are split over ``groups.cp``.

    Args:
        groups: the layout; cp may be 1.
        cp_comm_type: "p2p" (keys and values go round a ring while what is there is computed), "all_gather" (they are gathered),
            "a2a" (tokens are exchanged for heads) or "a2a+p2p" (heads between neighbours, a ring across them, with the two sizes of
            ``ParallelPlan.hierarchical_cp``); one name, or one a layer.
        window_size: (left, right) tokens that a query sees before and behind it, -1 for no limit; one window, or one a layer
            (None for a layer without). Causal attention sees nothing behind: right is 0, or -1.
        causal: a query sees no later key.
        softmax_type: "vanilla", or "off-by-one" to add 1 to the denominator. Learnt sinks belong to
            ``mcore_parallel.nn.SelfAttention`` (softmax_type="learnable").
        softmax_scale: factor of the scores; None for 1 / sqrt(d).
        layers: global numbers of this stage's layers, when what is given one a layer covers the whole model; None when it
            covers the layers of the stage.

    Returns:
        A core that conforms to ``mcore_parallel.nn.AttentionCore``.

    Raises:
        ValueError: an unknown name, other than two levels of ``hierarchical_cp``, a window below -1 or one that sees ahead in causal
            attention, lists that do not match the layers.

    Example:
        >>> core = context_parallel_attention(ProcessGroups.single(), window_size=(128, 0))
        >>> core.window
        (128, 0)
    """
    if softmax_type not in ("vanilla", "off-by-one"):
        raise ValueError(f'softmax_type={softmax_type!r} must be "vanilla" or "off-by-one"; give "learnable" to SelfAttention')
    names = (cp_comm_type,) if isinstance(cp_comm_type, str) else tuple(cp_comm_type)
    _check_names(names)
    layer_windows: Sequence[Window | None] = (window_size,) if window_size is None or isinstance(window_size[0], int) else window_size  # type: ignore[assignment]
    windows = tuple(_window(window, causal) for window in layer_windows)

    def build(name: str, window: Window) -> ContextParallelAttention:
        roles = _roles(groups, name)
        return ContextParallelAttention(**roles, window=window, softmax_scale=softmax_scale, sink_is_one=softmax_type == "off-by-one")

    if isinstance(cp_comm_type, str) and layer_windows is not window_size:
        return build(names[0], windows[0])
    if not isinstance(cp_comm_type, str):
        names = _of_stage(names, layers, "cp_comm_type")
    if layer_windows is window_size:
        windows = _of_stage(windows, layers, "window_size")
    count = max(len(names), len(windows))
    names, windows = (names * count if len(names) == 1 else names), (windows * count if len(windows) == 1 else windows)
    if len(names) != len(windows):
        raise ValueError(f"cp_comm_type has {len(names)} entries and window_size {len(windows)}; give one a layer of both")
    choices = list(zip(names, windows, strict=True))
    made = {(name, window): build(name, window) for name, window in choices}
    return LayeredAttention([made[choice] for choice in choices])


def exchange_size(cp_comm_type: str, plan: ParallelPlan) -> int:
    """Ranks among which this way to communicate exchanges tokens for heads; they must divide the heads of a tp rank.

    Raises:
        ValueError: an unknown name, other than two levels of ``hierarchical_cp``.

    Example:
        >>> [exchange_size(name, ParallelPlan(cp=4, hierarchical_cp=(2, 2))) for name in ("p2p", "a2a", "a2a+p2p")]
        [1, 4, 2]
    """
    _check_names((cp_comm_type,))
    sizes = plan.hierarchical_cp
    if cp_comm_type == "a2a+p2p" and len(sizes) != 2:
        raise ValueError(f'hierarchical_cp={sizes} must hold two sizes, (a2a, p2p), for cp_comm_type "a2a+p2p"; set it in the ParallelPlan')
    return plan.cp if cp_comm_type == "a2a" else sizes[0] if cp_comm_type == "a2a+p2p" else 1


def _check_names(names: Sequence[str]) -> None:
    if unknown := set(names) - set(CP_COMM_TYPES):
        raise ValueError(f"cp_comm_type={sorted(unknown)[0]!r} must be one of {', '.join(CP_COMM_TYPES)}")


def _roles(groups: ProcessGroups, name: str) -> dict[str, Group]:
    """The groups of a core's three ways to communicate."""
    cp = groups.cp
    alone = Group.single(cp.ranks[cp.rank])
    roles = {"gathered": alone, "heads": alone, "ring": alone}
    if name != "a2a+p2p":
        roles[{"p2p": "ring", "all_gather": "gathered", "a2a": "heads"}[name]] = cp
        return roles
    exchange_size(name, groups.plan)
    roles["heads"], roles["ring"] = groups.hierarchical_cp
    return roles


def _window(window: Window | None, causal: bool) -> Window:
    left, right = (-1, -1) if window is None else window
    if min(left, right) < -1:
        raise ValueError(f"window_size={(left, right)} must be two numbers of tokens, or -1 for no limit")
    if causal and right > 0:
        raise ValueError(f"window_size={(left, right)} sees {right} tokens ahead in causal attention; give ({left}, 0), or causal=False")
    return left, 0 if causal else right


def _of_stage(choices: tuple[T, ...], layers: range | None, field: str) -> tuple[T, ...]:
    """The entries of this stage's layers."""
    if layers is None:
        return choices
    if layers.stop > len(choices):
        raise ValueError(f"{field} has {len(choices)} entries, but layers={layers}; give one for each layer of the model")
    return choices[layers.start : layers.stop]
