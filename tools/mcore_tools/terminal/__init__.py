# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A conversation at a terminal, with an engine of this process or a server."""

from mcore_tools.terminal._answers import AnswerError, Answers, AnswerSettings, EngineAnswers
from mcore_tools.terminal._conversation import Conversation, StandardTerminal, Terminal
from mcore_tools.terminal._server import ServerAnswers

__all__ = ["AnswerError", "AnswerSettings", "Answers", "Conversation", "EngineAnswers", "ServerAnswers", "StandardTerminal", "Terminal"]
