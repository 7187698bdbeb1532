# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Serve a model over HTTP; settings, weights and tokenizer all come out of its checkpoint or folder.

mcore serve runs/moe_tiny --port 8000
mcore serve path/to/Qwen3-0.6B --max-length 8192
mcore serve path/to/Qwen3-0.6B --lora sql=runs/sql --lora chat=path/to/adapter      # requests name the model or an adapter
mcore serve runs/moe_tiny/checkpoints/step_00001000 --port 8000 --token-file secret

The folder of a run, of its steps (the newest is taken), one checkpoint that keeps ``run.yaml`` and a tokenizer, or a Hugging Face folder.
On SIGTERM or SIGINT (Ctrl-C) the server refuses new requests, ends the open ones within --drain-seconds and exits; a second signal cuts
them off. An engine of --join does the same: it leaves its coordinator when its requests are over. With --data-parallel N engines of N
processes, one a GPU, stand behind one address; one that ends or hangs is started again, and its requests go to the others. On GPUs one
engine is a process of its own as well (USE_COORDINATOR=0 in the environment keeps it in this one, 1 does so on CPUs too), and
--api-server-count processes answer HTTP at the one port. With --expert-parallel engines share the experts of a mixture, and end and start
together. With --tp N and --pp M each engine is split over N x M processes, one a GPU, which are started here or by torchrun; when one is
lost, all of them end.
Exit code: 0 done; 1 failed, 2 an input cannot be used, and why; 75 the engine failed several times in a row, or hangs: start it again.
"""

import argparse
import contextlib
import functools
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from mcore_ckpt import CheckpointingException
from mcore_ckpt.hf import import_hf
from mcore_inference import CoordinatorError, DynamicInferenceEngine, EngineDeadError, EngineRunner, LoraWeights
from mcore_inference.coordinator import CoordinatedRunner, is_loopback
from mcore_inference.server import (
    ConnectionLimits,
    GroupMember,
    InferenceServer,
    LoraFolders,
    ServerGroup,
    ServerLimits,
    StopSignals,
    WeightFolders,
    serve,
    serve_runner,
)
from mcore_parallel.guard import STALLED_EXIT_CODE
from mcore_tools._quiet_pipe import quiet_pipe
from mcore_tools.arguments import Parser, integer, number, option_name, secret
from mcore_tools.exit_code import FAILED, exit_code, under_way
from mcore_tools.generate import (
    LOG_FORMAT,
    add_expert_arguments,
    add_model_arguments,
    add_prompt_arguments,
    add_speculation_arguments,
    add_split_argument,
    balancing_of,
    check_length,
    continue_coordinated,
    engine_words,
    generate,
    load_loras,
    opened,
)
from mcore_tools.serving import (
    ApiServers,
    ApiServersError,
    CoordinatedEngines,
    EngineLayout,
    Job,
    add_engine_arguments,
    add_lora_arguments,
    check_lora_base,
    check_lora_slots,
    coordinated,
    end_process,
    frozen_heap,
    given_up_when_hung,
    lora_slots,
    open_served_tokenizer,
    read_lora,
    read_loras,
    sampling_names,
    served_model,
    settle_lora_slots,
    short_turns,
    uses_coordinator,
    work_for,
)
from mcore_tools.torchrun import report_error

_SERVER = "a server"
_USES = {
    **{name: ["--prompt"] for name in sampling_names()},
    "name": ["--join"],
    "max_waiting": ["--join", _SERVER],
    "stall_seconds": ["--join", _SERVER],
    "host": [_SERVER],
    "port": [_SERVER],
    "drain_seconds": ["--join", _SERVER],
    "tool_call_parser": [_SERVER],
    "lora_folder": [_SERVER],
    "token_file": [_SERVER],
    "served_model_name": [_SERVER],
    "max_refused_per_s": [_SERVER],
    "api_server_count": [_SERVER],
}
"""Where a flag says something."""
MOST_LORAS = 128
"""That a coordinator keeps for its engines."""
_DEFAULTS = {"host": "127.0.0.1", "port": 8000, "drain_seconds": 30.0, "max_waiting": 512}


@quiet_pipe
@short_turns()
def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = Parser("mcore serve", __doc__)
    add_model_arguments(parser)
    add_split_argument(parser)
    add_speculation_arguments(parser)
    add_expert_arguments(parser)
    add_engine_arguments(parser)
    add_lora_arguments(parser)
    add_prompt_arguments(parser)
    parser.add_argument("--host", help="address (default: 127.0.0.1); other than loopback it needs --token-file")
    parser.add_argument("--port", type=integer(0, 65_535), help="0 for a free one (default: 8000)")
    parser.add_argument("--drain-seconds", type=number(least=0), help="that open requests get to end at a signal (default: 30)")
    parser.add_argument("--max-waiting", type=integer(1), help="requests in the queue, then clients are sent away (default: 512)")
    parser.add_argument(
        "--max-refused-per-s",
        metavar="N",
        type=number(least=1e-3),
        help="requests of an address that are no HTTP or answered 4xx, on average; beyond, its connections are left unread (default: no "
        "limit)",
    )
    parser.add_argument(
        "--served-model-name", metavar="NAME", type=_model_name, help="of the model over HTTP (default: the last part of CHECKPOINT)"
    )
    parser.add_argument(
        "--stall-seconds",
        type=number(above=0),
        help="that a step may take before /health is red (default: 3.5 on a GPU; 60 on a CPU)",
    )
    parser.add_argument(
        "--tool-call-parser", choices=("hermes", "llama3_json", "mistral"), help="how the model writes calls of tools (default: no tools)"
    )
    parser.add_argument(
        "--weights-folder",
        metavar="FOLDER",
        type=Path,
        help="a trainer may have weights of Hugging Face folders below it loaded by POST /update_weights_from_disk; needs --token-file, "
        "and beyond loopback --weights-token-file",
    )
    parser.add_argument(
        "--lora-folder",
        metavar="FOLDER",
        type=Path,
        help="clients may have adapters of folders below it loaded by POST /v1/load_lora_adapter, and unloaded; needs secrets as "
        "--weights-folder",
    )
    parser.add_argument(
        "--weights-token-file",
        metavar="FILE",
        type=secret,
        help="file with a secret of --weights-folder's and --lora-folder's own: the one of --token-file generates, and changes no model "
        "then",
    )
    parser.add_argument("--token-file", metavar="FILE", type=secret, help="file with the secret that clients must send")
    parser.add_argument(
        "--data-parallel",
        metavar="N",
        type=integer(1),
        default=1,
        help="engines, each on a GPU (or --tp x --pp of them) of its own (default: 1)",
    )
    parser.add_argument(
        "--api-server-count",
        metavar="N",
        type=integer(1, 64),
        help="processes that answer HTTP at the one address (default: on GPUs one of four cores, at most four an engine and eight; else 1)",
    )
    parser.add_argument(
        "--expert-parallel",
        action="store_true",
        help="spread the experts of a mixture over the engines of --data-parallel, which then step, end and start together",
    )
    parser.add_argument(
        "--join",
        metavar="JOB",
        type=Job.named,
        help="work for a coordinator instead of serving HTTP: the --job-file of another host, or tcp://host:port on this one",
    )
    parser.add_argument(
        "--coordinator-host",
        metavar="ADDRESS",
        help="of this host, at which engines of other hosts may join those of --data-parallel; needs --job-file",
    )
    parser.add_argument(
        "--job-file", metavar="FILE", type=Path, help="gets address, secret and key for --join on other hosts; whoever can read it may join"
    )
    parser.add_argument(
        "--name",
        help="of an engine that joins, another than that of each other (default: host and process)",
    )
    words = sys.argv[1:] if arguments is None else list(arguments)
    options = parser.parse_args(words)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    # With RUST_BACKTRACE llguidance traces each level of an error: a wrong grammar would hold the engine for a minute.
    os.environ.setdefault("RUST_LIB_BACKTRACE", "0")
    try:
        _settle(options)
        _check_layout(options)
        options.loras = _read_loras(options)
        token, weights, loras = options.token_file, _weights(options), _lora_folders(options)
        if not (options.prompt or options.join or int(os.environ.get("RANK", "0"))):
            _check_address(options.host, options.port, token)
        if not options.join and _is_coordinated(options):
            if options.prompt:
                return continue_coordinated(options)
            return _serve_replicas(options, token, weights, loras)
        with opened("serve", words, options, num_sharing=options.data_parallel) as (engine, ranks):
            if not options.prompt and engine.context.device.type == "cuda":
                engine.warm_up()
            if options.prompt:
                code = generate(engine, options)
            elif ranks is not None and not engine.model.groups.tp_pp.is_first:
                with frozen_heap():
                    code = ranks.follow(engine)
            elif options.join:
                with frozen_heap():
                    code = work_for(engine, options.join, options.name, _limits(options), drain_s=options.drain_seconds)
            else:
                code = _serve(engine, options, token, weights, loras)
            if ranks is not None:
                ranks.leave(engine, code)
        return end_process(code)
    except torch.OutOfMemoryError as error:
        reason = str(error).partition(". ")[0]
        report_error(f"{reason}; lower --cache-gb or --max-requests, or split the model by --tp")
        return FAILED
    except (ValueError, OSError, CheckpointingException) as error:
        report_error(str(error))
        return exit_code(error)


def _settle(options: argparse.Namespace) -> None:
    """Refuse flags that would change nothing, and give the others that are missing their defaults."""
    if options.prompt and options.join:
        raise ValueError("--prompt and --join exclude each other: one continues texts and ends, one works for a coordinator")
    use = "--prompt" if options.prompt else "--join" if options.join else _SERVER
    for name, uses in _USES.items():
        if use in uses or getattr(options, name) is None:
            continue
        flag = f"--{name.replace('_', '-')}"
        if _SERVER in uses:
            raise ValueError(f"{flag} is of a server over HTTP, and {use} starts none; leave it out")
        raise ValueError(f"{flag} is of {uses[0]}; give both, or leave it out")
    for name, value in _DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.name = options.name or f"{socket.gethostname()}-{os.getpid()}"


def _is_coordinated(options: argparse.Namespace) -> bool:
    """Whether engines are processes of their own: several are, and on GPUs one that serves is, which launches kernels from Python."""
    if options.data_parallel > 1 or options.coordinator_host:
        return True
    return uses_coordinator(default=not options.prompt and torch.cuda.is_available())


def _num_api_servers(options: argparse.Namespace) -> int:
    """Processes that answer HTTP: one fills a core at some hundred requests/s, and where cores are few, engines need them."""
    if options.api_server_count is not None:
        return options.api_server_count
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores // 4, 4 * options.data_parallel, 8)) if torch.cuda.is_available() else 1


def _check_layout(options: argparse.Namespace) -> None:
    """Refuse flags that exclude each other."""
    if (options.api_server_count or 1) > 1 and not _is_coordinated(options):
        raise ValueError(
            f"--api-server-count {options.api_server_count} needs engines in processes of their own; set USE_COORDINATOR=1, or leave it out"
        )
    if options.data_parallel > 1 and (options.prompt or (options.join and not options.expert_parallel)):
        raise ValueError("--data-parallel serves HTTP; leave out --prompt and --join, or --data-parallel")
    if options.expert_parallel and options.data_parallel == 1:
        raise ValueError("--expert-parallel spreads experts over engines; give --data-parallel of 2 and more")
    if (options.coordinator_host is None) != (options.job_file is None) or (options.job_file and (options.join or options.prompt)):
        raise ValueError("--coordinator-host and --job-file go together, without --join and --prompt")
    if options.coordinator_host in ("0.0.0.0", "::", "*"):
        raise ValueError(
            f"--coordinator-host {options.coordinator_host} stands for all addresses of this host, and engines of others that connect to "
            "it reach themselves; give the one by which they reach this host"
        )


def _check_address(host: str, port: int, token: str | None) -> None:
    """Refuse, before a model is loaded, what the server would refuse after it."""
    if token is None and not is_loopback(host):
        raise ValueError(f"--host {host} is reachable from other machines; give --token-file, or --host 127.0.0.1")
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise ValueError(
            f"--host {host} --port {port} cannot be opened: {error.strerror}; choose others, --port 0 takes a free one"
        ) from error


def _weights(options: argparse.Namespace) -> WeightFolders | None:
    """Where new weights may come from; refused before a model is loaded."""
    if options.weights_folder is None:
        if options.weights_token_file is not None and options.lora_folder is None:
            raise ValueError("--weights-token-file guards --weights-folder and --lora-folder; give one of them, or leave it out")
        return None
    if options.expert_parallel:
        raise ValueError(
            "--weights-folder gives each engine all weights, and with --expert-parallel they load together; leave out one of the two"
        )
    _check_guard(options, "--weights-folder")
    return WeightFolders(root=options.weights_folder, read=_read_weights, token=options.weights_token_file)


def _lora_folders(options: argparse.Namespace) -> LoraFolders | None:
    """Where adapters may come from; refused before a model is loaded."""
    if options.lora_folder is None:
        return None
    _check_guard(options, "--lora-folder")
    check_lora_base(options.checkpoint)
    return LoraFolders(root=options.lora_folder, read=functools.partial(read_lora, options.checkpoint), token=options.weights_token_file)


def _check_guard(options: argparse.Namespace, flag: str) -> None:
    """Refuse what would let everybody change the model."""
    if options.token_file is None or options.prompt or options.join:
        raise ValueError(f"{flag} lets a client of the server replace the model; give --token-file, and leave out --prompt and --join")
    if options.weights_token_file is None and not is_loopback(options.host):
        raise ValueError(
            f"{flag} on --host {options.host} lets other machines replace the model; give --weights-token-file, a secret other than that "
            "of --token-file, or --host 127.0.0.1"
        )
    if options.weights_token_file == options.token_file:
        raise ValueError("--weights-token-file has the secret of --token-file, whose clients would replace the model; give it another")


def _read_weights(folder: Path) -> Iterable[tuple[str, Tensor]]:
    return import_hf(folder).tensors


def _read_loras(options: argparse.Namespace) -> dict[str, LoraWeights]:
    """The adapters of the command, and what is settled by them; refused before a model is loaded."""
    if options.lora and options.join:
        raise ValueError("--lora is of a server, whose coordinator brings adapters to engines that join it; leave it out")
    if options.prompt and len(options.lora) > 1:
        raise ValueError(f"--prompt goes through one adapter, and --lora names {len(options.lora)}; give one")
    name = _name_of_model(options)
    if any(name == lora for lora, _ in options.lora):
        raise ValueError(f"--lora {name}=... has the name of the model; give it another, or the model by --served-model-name")
    loras = read_loras(options.checkpoint, options.lora)
    flags = ("--lora-targets", "--lora", "--max-loras", "--max-lora-rank", "--lora-folder")
    given = [flag for flag in flags if getattr(options, option_name(flag))]
    settle_lora_slots(options, loras)
    if (slots := lora_slots(options)) is not None:
        try:
            check_lora_slots(options.checkpoint, slots)
        except ValueError as error:
            raise ValueError(f"{given[0]}: {error}") from error
    return loras


def _name_of_model(options: argparse.Namespace) -> str:
    """Over HTTP."""
    path = Path(options.checkpoint)
    # A folder that is called by its place has a name, too.
    return options.served_model_name or (path.resolve() if path.name in ("", "..") else path).name


def _limits(options: argparse.Namespace) -> ServerLimits:
    connections = ConnectionLimits(max_refused_per_s=options.max_refused_per_s)
    return ServerLimits(max_waiting_requests=options.max_waiting, stall_timeout_s=options.stall_seconds, connections=connections)


def _model_name(text: str) -> str:
    """A name that bodies may have as their model."""
    if not 0 < len(text) <= 256:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} must have 1 to 256 characters")
    return text


def _serve(
    engine: DynamicInferenceEngine,
    options: argparse.Namespace,
    token: str | None,
    weights: WeightFolders | None,
    loras: LoraFolders | None,
) -> int:
    """Serve until a signal comes, or the engine is given up."""
    # Listened to before the port opens, so that no client sees a server which a signal would cut off.
    with StopSignals() as signals:
        server = serve(
            engine,
            host=options.host,
            port=options.port,
            token=token,
            model_name=_name_of_model(options),
            limits=_limits(options),
            tool_call_parser=options.tool_call_parser,
            weights=weights,
            loras=loras,
        )
        with contextlib.ExitStack() as stack:
            if isinstance(server.runner, EngineRunner):
                stack.enter_context(given_up_when_hung(server.runner))
            return _wait(server, signals, options)


def _serve_replicas(options: argparse.Namespace, token: str | None, weights: WeightFolders | None, loras: LoraFolders | None) -> int:
    """Serve by engines in processes of their own."""
    check_length(options)
    if options.max_loras is not None and options.max_loras > MOST_LORAS:
        raise ValueError(f"--max-loras {options.max_loras} is more than the {MOST_LORAS} adapters that a coordinator keeps; lower it")
    layout = EngineLayout(tp=options.tp, pp=options.pp, num_sharing=options.data_parallel if options.expert_parallel else 1)
    layout.check(*served_model(options.checkpoint), balancing_of(options))
    words = engine_words(options, "--max-waiting", str(options.max_waiting), "--drain-seconds", str(options.drain_seconds))
    words += [] if options.stall_seconds is None else ["--stall-seconds", str(options.stall_seconds)]
    words += ["--data-parallel", str(options.data_parallel), "--expert-parallel"] if options.expert_parallel else []
    # Refused before a process starts.
    open_served_tokenizer(options.checkpoint)
    shown = functools.partial(
        _serve_member,
        checkpoint=options.checkpoint,
        model_name=_name_of_model(options),
        token=token,
        limits=_limits(options),
        tool_call_parser=options.tool_call_parser,
        weights=weights,
        loras=loras,
    )
    engines = functools.partial(
        coordinated,
        words,
        count=options.data_parallel,
        layout=layout,
        host=options.coordinator_host or "127.0.0.1",
        job_file=options.job_file,
    )
    count = _num_api_servers(options)
    with StopSignals() as signals, contextlib.closing(ServerGroup(options.host, options.port, count)) as group:
        if count == 1:
            with engines(is_stopped=lambda: signals.count > 0) as run:
                return 0 if run is None else _wait(shown(_loaded(run, options), group.member(0)), signals, options)
        with ApiServers(shown, group, drain_s=options.drain_seconds) as servers, engines(is_stopped=lambda: signals.count > 0) as run:
            return 0 if run is None else _wait_for_all(servers, _loaded(run, options), group, signals, options)


def _loaded(engines: CoordinatedEngines, options: argparse.Namespace) -> CoordinatedEngines:
    """Engines with the adapters of the command, which those get that are started again."""
    if options.loras:
        try:
            with engines() as runner:
                load_loras(runner, options.loras)
        except (CoordinatorError, EngineDeadError) as error:
            raise ValueError(f"the adapters of --lora cannot be loaded: {error}") from error
        # The coordinator keeps them.
        options.loras = {}
    return engines


def _serve_member(
    run: Callable[[], CoordinatedRunner],
    member: GroupMember,
    *,
    checkpoint: str,
    model_name: str,
    token: str | None,
    limits: ServerLimits,
    tool_call_parser: str | None,
    weights: WeightFolders | None,
    loras: LoraFolders | None,
) -> InferenceServer:
    """A server of this process, over engines of others."""
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    return serve_runner(
        run,
        open_served_tokenizer(checkpoint),
        token=token,
        model_name=model_name,
        limits=limits,
        tool_call_parser=tool_call_parser,
        weights=weights,
        loras=loras,
        member=member,
    )


def _wait_for_all(
    servers: ApiServers, engines: CoordinatedEngines, group: ServerGroup, signals: StopSignals, options: argparse.Namespace
) -> int:
    try:
        with under_way(), frozen_heap():
            servers.wait(engines, signals, on_open=lambda: _show(options, group.url))
    except (EngineDeadError, ApiServersError) as error:
        print(f"error: {error}", file=sys.stderr)
        return STALLED_EXIT_CODE
    return 0


def _show(options: argparse.Namespace, url: str) -> None:
    print(f"serving {options.checkpoint} on {url}/v1; Ctrl-C ends it", flush=True)


def _wait(server: InferenceServer, signals: StopSignals, options: argparse.Namespace) -> int:
    _show(options, server.url)
    try:
        with under_way(), frozen_heap():
            server.wait(signals, drain_s=options.drain_seconds)
    except (EngineDeadError, TimeoutError) as error:
        print(f"error: {error}", file=sys.stderr)
        return STALLED_EXIT_CODE
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
