# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Where continuations come from."""

from mcore_rl.inference._chat import ChatInferenceInterface, MegatronChatLocal
from mcore_rl.inference._hugging_face import HFInference
from mcore_rl.inference._interface import InferenceInterface
from mcore_rl.inference._local import MegatronLocal
from mcore_rl.inference._openai import OpenAIInference, PeerError, PeerReplyError, PeerTimeoutError

__all__ = [
    "ChatInferenceInterface",
    "HFInference",
    "InferenceInterface",
    "MegatronChatLocal",
    "MegatronLocal",
    "OpenAIInference",
    "PeerError",
    "PeerReplyError",
    "PeerTimeoutError",
]
