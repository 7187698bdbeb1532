# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Where the coordinator of a job is, and what engines bring to join it: by the environment of a process, or by a file for other hosts."""

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mcore_inference.coordinator import CoordinatorSecurity, is_loopback
from mcore_tools.arguments import endpoint

_SECRET, _KEY = "MCORE_COORDINATOR_SECRET", "MCORE_COORDINATOR_KEY"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A coordinator, as its engines know it."""

    address: str
    security: CoordinatorSecurity
    """Without the key that the coordinator alone has."""

    @classmethod
    def named(cls, text: str) -> "Job":
        """By an address, whose secrets are in the environment, or by the file of ``write``.

        Raises:
            argparse.ArgumentTypeError: neither of them, or an address of another host, whose coordinator has no key to encrypt by.
        """
        if text.startswith("tcp://"):
            address, secret, key = endpoint(text), os.environ.get(_SECRET, ""), os.environ.get(_KEY) or None
            if key is None and not _is_here(address):
                raise argparse.ArgumentTypeError(f"{text!r} is of another host, which takes encrypted engines only; give its --job-file")
            try:
                return cls(address=address, security=CoordinatorSecurity(secret=secret, public_key=key))
            except ValueError as error:
                raise argparse.ArgumentTypeError(f"{_SECRET} or {_KEY} of the environment: {error}") from None
        try:
            read = json.loads(Path(text).read_text(encoding="utf-8"))
            security = CoordinatorSecurity(secret=read["secret"], public_key=read["public_key"])
            address = endpoint(read["address"])
            if security.public_key is None and not _is_here(address):
                raise ValueError("its key is missing")
            return cls(address=address, security=security)
        except OSError as error:
            raise argparse.ArgumentTypeError(
                f"{text!r} is neither tcp://host:port nor a file that can be read ({error.strerror}); give that of the server's --job-file"
            ) from None
        except (ValueError, TypeError, KeyError, AttributeError, argparse.ArgumentTypeError):
            raise argparse.ArgumentTypeError(
                f"{text!r} is no file of `mcore serve --job-file`; give the one that the server wrote"
            ) from None

    def environment(self) -> Mapping[str, str]:
        """For processes of this host that are told the address; without a key an empty one, in place of another job's."""
        return {_SECRET: self.security.secret, _KEY: self.security.public_key or ""}

    def write(self, path: Path) -> None:
        """For engines of other hosts; whoever reads it may join, so its owner alone can.

        Raises:
            OSError: it cannot be written.
        """
        text = json.dumps({"address": self.address, "secret": self.security.secret, "public_key": self.security.public_key})
        new = path.with_name(f"{path.name}.{os.getpid()}")
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(text + "\n")
        new.replace(path)


def _is_here(address: str) -> bool:
    """Whether an ``endpoint`` is reached from this host alone."""
    return is_loopback(address.removeprefix("tcp://").rpartition(":")[0].strip("[]"))
