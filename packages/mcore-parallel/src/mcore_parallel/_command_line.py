# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The commands' parser."""

import argparse
import sys
from typing import NoReturn


class CommandParser(argparse.ArgumentParser):
    """A parser that refuses in one line, with exit code 2."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {message.removeprefix('argument ')}; {self.prog} --help lists what there is", file=sys.stderr)
        raise SystemExit(2)
