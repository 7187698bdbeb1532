# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Linear mixers with the weights of transformers' layers give what these give."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mcore_parallel import ProcessGroups
from mcore_parallel.nn import GatedDeltaNet, GatedDeltaNetConfig, MambaConfig, MambaMixer, Step

pytestmark = pytest.mark.filterwarnings("ignore")

# G groups, h heads of a group, P channels of a head, N channels of a state, K width of keys, V width of values.
WIDTH, GROUPS, HEADS, HEAD_DIM, STATE = 24, 2, 4, 12, 5


def mamba2() -> nn.Module:
    module = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    config = pytest.importorskip("transformers").Mamba2Config(
        hidden_size=WIDTH, num_heads=HEADS, head_dim=HEAD_DIM, n_groups=GROUPS, state_size=STATE, chunk_size=4, time_step_limit=(0.3, 2.0)
    )
    return module.Mamba2Mixer(config, layer_idx=0)


def bamba() -> nn.Module:
    module = pytest.importorskip("transformers.models.bamba.modeling_bamba")
    config = pytest.importorskip("transformers").BambaConfig(
        hidden_size=WIDTH, mamba_n_heads=HEADS, mamba_d_head=HEAD_DIM, mamba_n_groups=GROUPS, mamba_d_state=STATE, mamba_chunk_size=4,
        time_step_limit=(0.3, 2.0),
    )  # fmt: skip
    return module.BambaMixer(config, layer_idx=0)


def mamba_weights(theirs: nn.Module) -> dict[str, Tensor]:
    """Their columns [z of all groups | x | b | c | dt] by group."""
    state: dict[str, Any] = dict(theirs.state_dict())
    inner, shared = HEADS * HEAD_DIM, GROUPS * STATE

    def by_group(rows: Tensor, *sizes: int) -> Tensor:
        return torch.cat([part.unflatten(0, (GROUPS, -1)) for part in rows.split(sizes)], dim=1)

    return {
        "in_proj.weight": by_group(state["in_proj.weight"], inner, inner, shared, shared, HEADS),
        "conv.weight": by_group(state["conv1d.weight"][:, 0], inner, shared, shared),
        "conv.bias": by_group(state["conv1d.bias"], inner, shared, shared),
        "norm.weight": state["norm.weight"],
        "out_proj.weight": state["out_proj.weight"],
        **{name: state[name] for name in ("A_log", "D", "dt_bias")},
    }


def draw(module: nn.Module) -> None:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, 0.0, 0.5)


@pytest.mark.parametrize("published", [mamba2, bamba])
def test_mamba_equals_the_published_layer(published) -> None:
    theirs = published()
    draw(theirs)
    sizes = MambaConfig(state_dim=STATE, head_dim=HEAD_DIM, num_groups=GROUPS, num_heads=HEADS, chunk_size=4, dt_limits=(0.3, 2.0))
    ours = MambaMixer(WIDTH, sizes, ProcessGroups.single(), norm_epsilon=theirs.norm.variance_epsilon)
    ours.load_state_dict(mamba_weights(theirs))
    compare(ours, theirs)


def test_the_delta_net_equals_the_published_layer() -> None:
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    key_heads, value_heads, key_dim, value_dim = 2, 6, 8, 5
    config = pytest.importorskip("transformers").Qwen3NextConfig(
        hidden_size=WIDTH, linear_num_key_heads=key_heads, linear_num_value_heads=value_heads, linear_key_head_dim=key_dim,
        linear_value_head_dim=value_dim, linear_conv_kernel_dim=4, num_hidden_layers=1, layer_types=["linear_attention"],
    )  # fmt: skip
    theirs = module.Qwen3NextGatedDeltaNet(config, layer_idx=0)
    draw(theirs)
    sizes = GatedDeltaNetConfig(
        num_key_heads=key_heads, num_value_heads=value_heads, key_head_dim=key_dim, value_head_dim=value_dim, chunk_size=4
    )
    ours = GatedDeltaNet(WIDTH, sizes, ProcessGroups.single(), norm_epsilon=theirs.norm.variance_epsilon)
    state: dict[str, Any] = dict(theirs.state_dict())
    inner = value_heads // key_heads * value_dim
    q, k, v, z = state["in_proj_qkvz.weight"].unflatten(0, (key_heads, -1)).split((key_dim, key_dim, inner, inner), dim=1)
    b, a = state["in_proj_ba.weight"].unflatten(0, (key_heads, -1)).chunk(2, dim=1)
    taps = state["conv1d.weight"][:, 0].split((key_heads * key_dim, key_heads * key_dim, value_heads * value_dim))
    conv_q, conv_k, conv_v = (part.unflatten(0, (key_heads, -1)) for part in taps)
    ours.load_state_dict(
        {
            "in_proj.weight": torch.cat((z, v, k, q, a, b), dim=1),
            "conv.weight": torch.cat((conv_v, conv_k, conv_q), dim=1),
            "norm.weight": state["norm.weight"],
            "out_proj.weight": state["out_proj.weight"],
            "A_log": state["A_log"],
            "dt_bias": state["dt_bias"],
        }
    )
    compare(ours, theirs)


def compare(ours: nn.Module, theirs: nn.Module) -> None:
    """Forward and the gradient of the input, at a length that no chunk divides."""
    x = torch.randn(2, 11, WIDTH)
    leaves = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    wanted = theirs(leaves[1])
    wanted = wanted if isinstance(wanted, Tensor) else wanted[0]
    found = ours(leaves[0].flatten(0, 1), Step.causal(2, 11)).unflatten(0, (2, 11))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    found.square().sum().backward()
    wanted.square().sum().backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad, rtol=1e-3, atol=1e-3)
