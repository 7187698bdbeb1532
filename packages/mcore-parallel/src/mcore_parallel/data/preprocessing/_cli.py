# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Command ``mcore-preprocess``: files of text into a .bin/.idx corpus, and its indices for a run."""

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from mcore_parallel._command_line import CommandParser, exit_code
from mcore_parallel._quiet_pipe import quiet_pipe
from mcore_parallel.data._errors import DataError
from mcore_parallel.data.datasets import BlendedMegatronDatasetBuilder, GPTDataset, GPTDatasetConfig, Split, parse_blend
from mcore_parallel.data.preprocessing._conversations import ChatTokenizer, preprocess_conversations
from mcore_parallel.data.preprocessing._preprocess import PreprocessReport, preprocess
from mcore_parallel.data.tokenizers import build_tokenizer

_QUIET_S = 2.0
"""Lines follow one another no faster."""


@contextmanager
def progress(choice: str) -> Iterator[Callable[[int, int, float], None] | None]:
    """What draws documents, tokens, documents a second and the time left, or None where nothing is to be drawn.

    A bar if rich is installed and standard error is a terminal, else a line every few seconds.

    Args:
        choice: "on", "off", or "auto", which is on where standard error is a terminal.
    """
    if choice == "off" or (choice == "auto" and not sys.stderr.isatty()):
        yield None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    except ImportError:
        yield _Lines()
        return
    if not sys.stderr.isatty():
        yield _Lines()
        return
    columns = (TextColumn("{task.description}"), BarColumn(20), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("tokenise", total=1.0)

        def show(documents: int, tokens: int, share: float) -> None:
            bar.update(task, completed=share, description=_count(documents, tokens, bar.tasks[0].elapsed or 0.0))

        yield show


def _count(documents: int, tokens: int, elapsed_s: float) -> str:
    rate = f", {documents / elapsed_s:,.0f} documents/s" if elapsed_s else ""
    return f"{documents:,} documents, {tokens:,} tokens{rate}"


class _Lines:
    """Progress as lines of text: the first batch, then one every few seconds."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._last = float("-inf")

    def __call__(self, documents: int, tokens: int, share: float) -> None:
        now = time.monotonic()
        if now - self._last < _QUIET_S and share < 1.0:
            return
        self._last, elapsed = now, now - self._start
        left = f", {elapsed * (1.0 - share) / share:.0f} s left" if share else ""
        print(f"{share:4.0%} {_count(documents, tokens, elapsed)}{left}", file=sys.stderr, flush=True)


@quiet_pipe
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 when all was written, 1 when that failed, 2 for inputs that cannot be used."""
    arguments = _parsed(argv)
    wrote = False
    try:
        if arguments.input:
            _write(arguments)
            wrote = True
        if arguments.build_cache:
            _build_cache(arguments)
    except BrokenPipeError:
        raise
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if wrote else exit_code(error)
    except KeyboardInterrupt:
        print("interrupted; finished pieces stay, the same command goes on with the others", file=sys.stderr)
        return 130
    return 0


def _write(arguments: argparse.Namespace) -> None:
    with progress(arguments.progress) as on_progress:
        if arguments.conversations:
            report = _conversations(arguments)
        else:
            report = preprocess(
                arguments.input,
                arguments.output_prefix,
                arguments.tokenizer,
                append_eod=arguments.append_eod,
                json_key=arguments.json_key or "text",
                encoding_errors=arguments.encoding_errors,
                workers=arguments.workers,
                partitions=arguments.partitions,
                partition=arguments.partition,
                on_progress=on_progress,
            )
    what = "without such a turn" if arguments.conversations else "empty ones"
    skipped = f", {report.num_skipped} {what} skipped" if report.num_skipped else ""
    resumed = f", {report.num_resumed} of them by an earlier run" if report.num_resumed else ""
    piece = "" if arguments.partition is None else f" piece {arguments.partition} of {arguments.partitions}"
    print(
        f"{arguments.output_prefix}{piece}: {report.num_documents} documents{resumed}{skipped}, {report.num_tokens} {report.dtype} tokens, "
        f"{report.seconds:.1f} s, {report.documents_per_second:.0f} documents/s"
    )


def _conversations(arguments: argparse.Namespace) -> PreprocessReport:
    tokenizer = build_tokenizer(arguments.tokenizer)
    if not isinstance(tokenizer, ChatTokenizer):
        raise DataError(f"--tokenizer {arguments.tokenizer} knows no turns; name another")
    if arguments.append_eod or arguments.workers != 1 or arguments.partitions is not None:
        raise DataError(
            "--conversations end with their last turn and are read by one process; leave out --append-eod, --workers and --partitions"
        )
    return preprocess_conversations(
        arguments.input,
        arguments.output_prefix,
        tokenizer,
        trained_roles=arguments.trained_roles,
        json_key=arguments.json_key or "messages",
    )


def _build_cache(arguments: argparse.Namespace) -> None:
    started = time.perf_counter()
    config = GPTDatasetConfig(
        random_seed=arguments.seed,
        sequence_length=arguments.sequence_length,
        blend=parse_blend(arguments.blend or [arguments.output_prefix]),
        split=arguments.split,
        path_to_cache=arguments.cache,
        tokenizer=build_tokenizer(arguments.tokenizer),
        num_dataset_builder_threads=arguments.workers,
    )
    with warnings.catch_warnings():
        # A run goes on without a cache; here it is all that was asked for.
        warnings.filterwarnings("error", "index cache .* cannot be written")
        try:
            built = BlendedMegatronDatasetBuilder(GPTDataset, arguments.samples, lambda: True, config).build()
        except UserWarning as warning:
            raise DataError(str(warning).replace("set path_to_cache to", "set --cache to")) from warning
    sizes = ", ".join(f"{split.name} {len(part)}" for split, part in zip(Split, built, strict=True) if part is not None)
    where = arguments.cache or "a folder beside each corpus"
    print(f"indices in {where}: samples of {sizes}; {time.perf_counter() - started:.1f} s")


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(prog="mcore-preprocess", description="Tokenise text into a .bin/.idx corpus, and index it for a run.")
    parser.add_argument(
        "--input", nargs="+", help="files or folders; .jsonl holds a document a line, .parquet one a row, other text is one; packed or not"
    )
    parser.add_argument("--output-prefix", help="where to write, without .bin and .idx")
    parser.add_argument(
        "--tokenizer", required=True, help="byte, null:VOCAB_SIZE, or the path of a tokenizer.json, .model, .tiktoken or its folder"
    )
    parser.add_argument("--append-eod", action="store_true", help="end every document with the end-of-document id")
    parser.add_argument("--conversations", action="store_true", help="lines hold lists of messages; write turns with what is to be learnt")
    parser.add_argument("--trained-roles", nargs="+", default=["assistant"], help="whose turns are learnt (default: assistant)")
    parser.add_argument("--json-key", help="field of a line or column that holds the text or the messages (default: text, messages)")
    parser.add_argument(
        "--encoding-errors", choices=("strict", "replace"), default="strict", help="bytes that are not UTF-8 (default: %(default)s)"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes that tokenise, one for each core (default: one, with threads)")
    parser.add_argument("--partitions", type=int, help="pieces, finished ones of which outlive a killed run (default: one for each GiB)")
    parser.add_argument("--partition", type=int, help="make this piece only, from 0; without it, those that are missing, and join all")
    parser.add_argument(
        "--progress", choices=("auto", "on", "off"), default="auto", help="progress on stderr; auto: on a terminal (default: %(default)s)"
    )
    cache = parser.add_argument_group("indices of a run", "All of these must be as in the run, the paths of corpora too.")
    cache.add_argument("--build-cache", action="store_true", help="build the indices of GPTDataset, so that no rank has to")
    cache.add_argument("--blend", nargs="+", help="prefixes, or weight and prefix in turn (default: the output prefix)")
    cache.add_argument("--sequence-length", type=int, help="tokens of a sample")
    cache.add_argument("--samples", nargs=3, type=_samples, metavar=("TRAIN", "VALID", "TEST"), help='numbers, or "all" for one epoch')
    cache.add_argument("--seed", type=int, default=1234, help="of the order (default: %(default)s)")
    cache.add_argument("--split", help="shares of the documents, such as 99,1,0")
    cache.add_argument("--cache", help="folder of the indices (default: one beside each corpus)")
    arguments = parser.parse_args(argv)
    if not arguments.input and not arguments.build_cache:
        parser.error("--input or --build-cache is required")
    if not arguments.output_prefix and (arguments.input or not arguments.blend):
        parser.error("--output-prefix is required")
    if arguments.build_cache and None in (arguments.sequence_length, arguments.samples, arguments.split):
        parser.error("--build-cache requires --sequence-length, --samples and --split")
    if arguments.build_cache and arguments.partition is not None:
        parser.error("--build-cache needs the whole corpus; leave out --partition")
    return arguments


def _samples(word: str) -> int | None:
    if word != "all" and not word.isdecimal():
        raise argparse.ArgumentTypeError(f"{word!r} must be a whole number, or all")
    return None if word == "all" else int(word)


if __name__ == "__main__":
    sys.exit(main())
