# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Command ``mcore-preprocess``: text files into a .bin/.idx corpus."""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from mcore_parallel.data._conversations import ChatTokenizer, preprocess_conversations
from mcore_parallel.data._errors import DataError
from mcore_parallel.data._preprocess import PreprocessReport, preprocess
from mcore_parallel.data._tokenizer_files import build_tokenizer


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 when a corpus was written, 1 when not, 2 for wrong usage."""
    arguments = _parser().parse_args(argv)
    try:
        with _progress(_shown(arguments.progress)) as on_progress:
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
                    on_progress=on_progress,
                )
    except (DataError, OSError) as error:
        print(f"mcore-preprocess: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("mcore-preprocess: interrupted; nothing was written", file=sys.stderr)
        return 130
    what = "without such a turn" if arguments.conversations else "empty ones"
    skipped = f", {report.num_skipped} {what} skipped" if report.num_skipped else ""
    print(
        f"{arguments.output_prefix}: {report.num_documents} documents{skipped}, {report.num_tokens} {report.dtype} tokens, "
        f"{report.seconds:.1f} s, {report.documents_per_second:.0f} documents/s"
    )
    return 0


def _conversations(arguments: argparse.Namespace) -> PreprocessReport:
    tokenizer = build_tokenizer(arguments.tokenizer)
    if not isinstance(tokenizer, ChatTokenizer):
        raise DataError(f"--tokenizer {arguments.tokenizer} knows no turns; name another")
    if arguments.append_eod or arguments.workers != 1:
        raise DataError("--conversations end with their last turn and are read by one process; leave out --append-eod and --workers")
    return preprocess_conversations(
        arguments.input,
        arguments.output_prefix,
        tokenizer,
        trained_roles=arguments.trained_roles,
        json_key=arguments.json_key or "messages",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mcore-preprocess", description="Tokenise text into a .bin/.idx corpus.")
    parser.add_argument("--input", nargs="+", required=True, help="files or folders; .txt, .md, .py hold one document, .jsonl one a line")
    parser.add_argument("--output-prefix", required=True, help="where to write, without .bin and .idx")
    parser.add_argument(
        "--tokenizer", required=True, help="byte, null:VOCAB_SIZE, or the path of a tokenizer.json, .model, .tiktoken or its folder"
    )
    parser.add_argument("--append-eod", action="store_true", help="end every document with the end-of-document id")
    parser.add_argument("--conversations", action="store_true", help="lines hold lists of messages; write turns with what is to be learnt")
    parser.add_argument("--trained-roles", nargs="+", default=["assistant"], help="whose turns are learnt (default: assistant)")
    parser.add_argument("--json-key", help="field of a JSON line that holds the text or the messages (default: text, messages)")
    parser.add_argument("--encoding-errors", choices=("strict", "replace"), default="strict", help="bytes that are not UTF-8")
    parser.add_argument("--workers", type=int, default=1, help="processes that tokenise (default: %(default)s)")
    parser.add_argument("--progress", choices=("auto", "on", "off"), default="auto", help="progress line on stderr; auto: on a terminal")
    return parser


def _shown(choice: str) -> bool:
    return choice == "on" or (choice == "auto" and sys.stderr.isatty())


@contextmanager
def _progress(shown: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Callback that draws documents, tokens and documents/s, with rich if it is installed, else as one rewritten line."""
    if not shown:
        yield None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    except ImportError:
        yield lambda documents, tokens: print(f"\r{documents} documents, {tokens} tokens", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        return
    line = TextColumn("{task.completed:,.0f} documents, {task.fields[tokens]:,} tokens, {task.fields[rate]}")
    with Progress(SpinnerColumn(), line, TimeElapsedColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("tokenise", total=None, tokens=0, rate="")

        def show(documents: int, tokens: int) -> None:
            elapsed = bar.tasks[0].elapsed or 0.0
            bar.update(task, completed=documents, tokens=tokens, rate=f"{documents / elapsed:,.0f} documents/s" if elapsed else "")

        yield show


if __name__ == "__main__":
    sys.exit(main())
