# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Why rollouts are cancelled at the end of their time: they end with the answers that are there."""

LATE = "the rollouts' time is over"
