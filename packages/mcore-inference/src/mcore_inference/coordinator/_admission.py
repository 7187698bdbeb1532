# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Who may join a coordinator, and who may control its engines."""

import hmac

from mcore_inference.coordinator._config import CoordinatorSecurity
from mcore_inference.coordinator._messages import MAX_NAME, PROTOCOL, Connect, Register
from mcore_inference.coordinator._states import GroupState

NO_CONTROL = "needs control_secret, which this client did not bring; connect with CoordinatorSecurity(control_secret=...)"
"""Behind the name of what a client without it asked for."""


class Admission:
    """Compares secrets in constant time.

    Args:
        security: the coordinator's.
    """

    def __init__(self, security: CoordinatorSecurity) -> None:
        self._secret = security.secret.encode()
        self._control_secret = None if security.control_secret is None else security.control_secret.encode()

    def refusal(self, greeting: Connect | Register) -> str | None:
        """Why a peer may not join; None when it may."""
        if greeting.protocol != PROTOCOL:
            return f"protocol={greeting.protocol} is not {PROTOCOL}; use one version of mcore-inference"
        if not hmac.compare_digest(greeting.secret.encode(), self._secret):
            return "secret is not that of this job"
        if isinstance(greeting, Connect):
            return None
        if greeting.state not in tuple(GroupState):
            return f"state={greeting.state[:MAX_NAME]!r} is none of {', '.join(GroupState)}"
        if not 0 < len(greeting.name) <= MAX_NAME:
            return f"name={greeting.name[:MAX_NAME]!r} has {len(greeting.name)} characters; give a name of 1 to {MAX_NAME}"
        return None

    def may_control(self, greeting: Connect) -> bool:
        """Whether a client may send signals and weights."""
        wanted = self._control_secret
        return wanted is None or hmac.compare_digest(greeting.control_secret.encode(), wanted)
