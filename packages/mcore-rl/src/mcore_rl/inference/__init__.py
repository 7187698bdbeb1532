# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Where continuations come from."""

from mcore_rl._http import PeerError, PeerReplyError, PeerTimeoutError
from mcore_rl._lost import LostError
from mcore_rl.inference._balanced import BalancedInference
from mcore_rl.inference._chat import ChatInferenceInterface, MegatronChatLocal
from mcore_rl.inference._hugging_face import HFInference
from mcore_rl.inference._interface import InferenceInterface
from mcore_rl.inference._local import MegatronLocal
from mcore_rl.inference._openai import OpenAIInference
from mcore_rl.inference._ray import RayInference
from mcore_rl.inference._request_seeds import RequestSeeds
from mcore_rl.inference._sglang import SGLangInference
from mcore_rl.inference._weight_server import WeightServer

__all__ = [
    "BalancedInference",
    "ChatInferenceInterface",
    "HFInference",
    "InferenceInterface",
    "LostError",
    "MegatronChatLocal",
    "MegatronLocal",
    "OpenAIInference",
    "PeerError",
    "PeerReplyError",
    "PeerTimeoutError",
    "RayInference",
    "RequestSeeds",
    "SGLangInference",
    "WeightServer",
]
