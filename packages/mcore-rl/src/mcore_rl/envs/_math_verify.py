# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The library Math-Verify, which compares answers as expressions."""

import logging


class MathVerify:
    """Whether two answers are the same expression, set, interval or matrix, by Math-Verify.

    It simplifies what a model wrote, which may take any time and memory: for processes that have limits of both. Its own limits, which are
    alarms of the main thread, are off.

    Raises:
        ModuleNotFoundError: the library is not installed; names the extra.
    """

    def __init__(self) -> None:
        try:
            import math_verify  # pyright: ignore[reportMissingImports]
        except ModuleNotFoundError as error:
            if error.name != "math_verify":
                raise
            raise ModuleNotFoundError('math-verify is not installed: pip install "mcore-rl[maths]"', name="math_verify") from None
        self._library = math_verify
        # It warns once a process that its limits are off.
        for module in ("parser", "grader"):
            logging.getLogger(f"math_verify.{module}").setLevel(logging.ERROR)

    def same(self, answer: str, golden: str) -> bool:
        """Whether ``answer`` is ``golden``; what cannot be read is no answer.

        Raises:
            ValueError: ``golden`` cannot be read.
        """
        expected = self._read(golden)
        if not expected:
            raise ValueError(f"the golden answer {golden!r} is none that math-verify reads; correct the file, or set maths.judge='own'")
        return bool(self._library.verify(expected, self._read(answer), timeout_seconds=None))

    def _read(self, text: str) -> list[object]:
        return self._library.parse(f"\\boxed{{{text}}}", parsing_timeout=None)
