# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Continue prompts with the model of a checkpoint, or serve it over HTTP; settings, weights and tokenizer all come out of the checkpoint.

python -m mcore_tools.serve runs/moe_tiny/checkpoints --prompt "def main" --prompt "import"
python -m mcore_tools.serve runs/moe_tiny/checkpoints/step_00001000 --port 8000 --token-file secret

Any checkpoint that keeps ``run.yaml`` and a tokenizer does, such as those of mcore_tools.train and the quickstart; of a folder of steps
it is the newest. On SIGTERM or SIGINT (Ctrl-C) the server refuses new requests, ends the open ones within --drain-seconds and exits; a
second signal cuts them off. Exit status: 0 done, 1 something was refused, and why; 2 the engine failed several times in a row, or hangs.
"""

import argparse
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from mcore_ckpt import CheckpointingException, load
from mcore_ckpt.assets import extract_assets
from mcore_ckpt.inspect import resolve_folder
from mcore_ckpt.manifest import read_manifest
from mcore_inference import DynamicInferenceEngine, EngineDeadError, SamplingParams
from mcore_inference.server import StopSignals, serve
from mcore_parallel.training import model_state
from mcore_tools.recipes import read_config
from mcore_tools.serving import build_engine
from mcore_tools.training import device_of, open_tokenizer

_NEEDED = ("run.yaml", "tokenizer/tokenizer.json")


def open_engine(
    checkpoint: str | Path, device: torch.device | str, *, max_length: int | None = None, cache_gb: float = 1.0
) -> DynamicInferenceEngine:
    """An engine with the model, weights and tokenizer of a checkpoint, all on this process.

    Args:
        checkpoint: a checkpoint, or a folder of steps, whose newest is taken.
        device: where it runs.
        max_length: tokens of a prompt and its continuation; None for the length that the run trained on.
        cache_gb: memory for keys and values, in GB.

    Raises:
        CheckpointingException: no checkpoint, a damaged one, or one without the files that say what it is.
        ValueError: a model that generates nothing, or settings that it refuses.
    """
    folder = resolve_folder(checkpoint)
    missing = [name for name in _NEEDED if name not in read_manifest(folder).assets]
    if missing:
        raise CheckpointingException(
            f"{folder} keeps no {' and no '.join(missing)}; save it with assets= (mcore_tools.train does), or serve an export of it"
        )
    with tempfile.TemporaryDirectory() as place:
        extract_assets(folder, place)
        config = read_config(Path(place) / "run.yaml")
        if config.masked:
            raise ValueError(f"{folder} holds an encoder, which generates nothing")
        tokenizer = open_tokenizer(str(Path(place) / "tokenizer"), config.model.vocab_size)
    engine = build_engine(config, tokenizer, device, max_length=max_length or config.train.seq_len, cache_gb=cache_gb)
    load(model_state(engine.model, engine.model.groups), folder, strict=False)
    return engine


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="of a run, or its folder of steps")
    parser.add_argument("--prompt", action="append", default=[], help="continue this text and end; may be given again")
    parser.add_argument("--max-tokens", type=int, default=64, help="of a continuation (default: 64)")
    parser.add_argument("--temperature", type=float, default=0.0, help="of a continuation (default: 0, the likeliest token)")
    parser.add_argument("--max-length", type=int, help="tokens of prompt and continuation (default: what the run trained on)")
    parser.add_argument("--cache-gb", type=float, default=1.0, help="memory for keys and values (default: 1)")
    parser.add_argument("--host", default="127.0.0.1", help="address to serve on; other than loopback it needs --token-file")
    parser.add_argument("--port", type=int, default=8000, help="0 for a free one (default: 8000)")
    parser.add_argument("--drain-seconds", type=float, default=30.0, help="that open requests get to end at a signal (default: 30)")
    parser.add_argument("--max-waiting", type=int, default=512, help="requests in the queue, then clients are sent away (default: 512)")
    parser.add_argument("--token-file", type=Path, help="file with the secret that clients must send")
    options = parser.parse_args(arguments)
    try:
        token = None if options.token_file is None else options.token_file.read_text(encoding="utf-8").strip()
        device = device_of("cuda" if torch.cuda.is_available() else "cpu")
        engine = open_engine(options.checkpoint, device, max_length=options.max_length, cache_gb=options.cache_gb)
        if options.prompt:
            params = SamplingParams(temperature=options.temperature, num_tokens_to_generate=options.max_tokens)
            records = engine.generate(options.prompt, params)
            for prompt, record in zip(options.prompt, records, strict=True):
                if record.error is None:
                    print(prompt + record.generated_text)
                else:
                    print(f"error: {record.error}", file=sys.stderr)
            return 1 if any(record.error is not None for record in records) else 0
        return _serve(engine, options, token)
    except (ValueError, OSError, CheckpointingException) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _serve(engine: DynamicInferenceEngine, options: argparse.Namespace, token: str | None) -> int:
    """Serve until a signal comes, or the engine is given up."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    # Listened to before the port opens, so that no client sees a server which a signal would cut off.
    with StopSignals() as signals:
        server = serve(
            engine,
            host=options.host,
            port=options.port,
            token=token,
            model_name=Path(options.checkpoint).name,
            max_waiting_requests=options.max_waiting,
        )
        print(f"serving {options.checkpoint} on {server.url}/v1; Ctrl-C ends it", flush=True)
        try:
            server.wait(signals, drain_s=options.drain_seconds)
        except (EngineDeadError, TimeoutError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
