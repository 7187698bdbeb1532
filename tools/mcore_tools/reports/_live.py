# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The page of a run that is under way."""

import json
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

from mcore_tools.reports._history import History
from mcore_tools.reports._plot import Plot
from mcore_tools.reports._report import Section, write_report

EXAMPLES = "examples.jsonl"
"""Of a run that learns from rewards: answers to look at, beside its page."""
# Of an iteration, in their order.
_PHASES = ("to_generation", "generate", "wait", "to_training", "exchange", "pack", "score", "update", "refit", "evaluate, save")
_NUM_EXAMPLES, _TAIL_BYTES = 8, 1 << 17
# A browser looks as often; the page is written at most as often, and takes at most this share of the run's time.
_REFRESH_S, _SHARE = 10, 0.01


class LiveReport:
    """Writes ``report.html`` now and then while a run is under way, and at its end; a writer like the others.

    The page opens from the disk and reads itself again until the run has ended.

    Args:
        path: of the page.
        title: its heading.
        steps: last step of the run.
        config: the run's configuration as text.
        history: numbers of the steps before.
        now: seconds; a clock.
    """

    def __init__(
        self, path: Path, title: str, steps: int, config: str, history: History, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self.path, self.title, self.steps, self.config, self._now = path, title, steps, config, now
        self.history = history
        self._due = now() + _REFRESH_S

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.history.write(step, values)
        if (begin := self._now()) >= self._due:
            self._page(_REFRESH_S)
            end = self._now()
            self._due = end + max(_REFRESH_S, (end - begin) / _SHARE)

    def close(self) -> None:
        if self.history.recent:
            self._page(None)

    def _page(self, refresh_s: int | None) -> None:
        write_report(self.path, self.title, self._sections(refresh_s is None), self._plots(), refresh_s)

    def _plots(self) -> list[Plot]:
        curve = self.history.curve
        names = self.history.names
        plots = [Plot(title="Loss", x_label="step", y_label="nats a token", curves=_known(curve, training="loss", validation="eval/loss"))]
        if "reward" in names:
            plots = [*self._rewards(), *plots]
        for title, unit, name in (
            ("Answer length", "tokens", "answer_length"),
            ("Entropy of the policy", "nats a token", "entropy"),
            ("Answers that the limit of tokens ended", "share", "truncated"),
            ("Answers to one problem are alike by", "share of neighbouring tokens", "group_similarity"),
            ("Divergence from the reference", "nats a token", "kl"),
            ("Engine and trainer disagree by", "nats a token", "logprob_mismatch"),
            ("Divergence of the trainer from the engine", "nats a token", "mismatch_k3"),
            ("Effective sample size of the importance weights", "share of the tokens", "effective_sample_size"),
            ("Places of the bins that labels fill", "share", "packing_efficiency"),
            ("Gradient norm", "before clipping", "grad_norm"),
            ("Learning rate", "", "lr"),
            ("Throughput", "tokens/s", "tokens_per_s"),
            ("Model flops utilisation", "share of the peak", "mfu"),
            ("Batch", "sequences", "num_samples"),
            ("Slowest rank", "times the median of its stage", "straggler/slowdown"),
            ("Exposed communication", "share of a traced step", "communication/exposed_share"),
        ):
            if name in names:
                plots.append(Plot(title=title, x_label="step", y_label=unit, curves={"": curve(name)}))
        ages = {f"{name.removeprefix('token_lag/')} refits": curve(name) for name in names if name.startswith("token_lag/")}
        if ages:
            plots.append(Plot(title="Age of the tokens", x_label="iteration", y_label="share of the tokens", curves=ages))
        times = {name.removeprefix("time/"): curve(name) for name in names if name.startswith("time/") and name.count("/") == 1}
        if times:
            plots.append(Plot(title="Parts of a step, slowest rank", x_label="step", y_label="seconds a step", curves=times))
        loads = {name.removeprefix("aux/load/"): curve(name) for name in names if name.startswith("aux/load/")}
        if "aux/load" in names:
            curves = {"mean of the layers": curve("aux/load"), **loads}
            plots.append(Plot(title="Expert load", x_label="step", y_label="busiest over mean", curves=curves))
        losses = {name.removeprefix("aux/"): curve(name) for name in names if name.startswith("aux/") and name.endswith("_loss")}
        if losses:
            plots.append(Plot(title="Auxiliary losses", x_label="step", y_label="mean of the layers", curves=losses))
        return plots

    def _rewards(self) -> list[Plot]:
        """What is seen of a run that learns from rewards."""
        curve = self.history.curve
        samples = {name.removeprefix("eval/"): name for name in self.history.names if name.startswith("eval/pass@")}
        rewards = _known(curve, training="reward", evaluation="eval/reward", right="eval/right", **samples)
        times = _known(curve, generate="rollout_s", train="train_s", refit="refit_s")
        counts = _known(curve, dropped="num_dropped", filtered="num_filtered")
        by_name = [name for name in self.history.names if name.startswith("env/") and name.endswith("/reward")]
        each = {name.removeprefix("env/").removesuffix("/reward"): curve(name) for name in by_name}
        return [
            Plot(title="Reward", x_label="iteration", y_label="mean of the answers", curves=rewards),
            *([Plot(title="Reward by environment", x_label="iteration", y_label="mean of the answers", curves=each)] if each else []),
            Plot(title="Seconds of an iteration", x_label="iteration", y_label="seconds", curves=times),
            self._timeline(),
            *self._lengths(),
            Plot(title="Answers dropped, groups replaced", x_label="iteration", y_label="count", curves=counts),
        ]

    def _timeline(self) -> Plot:
        """What the newest iterations spent their time on, in the order of the phases."""
        phases: dict[str, dict[int, float]] = {}
        for step, row in self.history.recent:
            for name, seconds in _phases(row).items():
                phases.setdefault(name, {})[step] = seconds
        bars = {name: (list(phases[name]), list(phases[name].values())) for name in _PHASES if any(phases.get(name, {}).values())}
        return Plot(title="Timeline of the newest iterations", x_label="iteration", y_label="seconds", bars=bars)

    def _lengths(self) -> list[Plot]:
        """How long answers are, of the newest iterations and of the first."""
        spans = {
            name: tuple(map(int, name.removeprefix("length/").split("-"))) for name in self.history.names if name.startswith("length/")
        }
        if not spans:
            return []
        spans = dict(sorted(spans.items(), key=lambda item: item[1]))
        rows = [row for _, row in self.history.recent if any(name in row for name in spans)]
        middles = [(first + last) / 2 for first, last in spans.values()]
        begin = min(self.history.curve(name)[0][0] for name in spans)
        firsts = [self.history.curve(name) for name in spans]
        newest = [sum(row.get(name, 0.0) for row in rows) / max(1, len(rows)) for name in spans]
        curves = {f"iteration {begin:g}": (middles, [values[0] if steps[0] == begin else 0.0 for steps, values in firsts])}
        width = min(last - first + 1 for first, last in spans.values())
        bars = {f"newest {len(rows)}": (middles, newest)}
        return [
            Plot(title="Lengths of answers", x_label="tokens", y_label="share of the answers", curves=curves, bars=bars, bar_width=width)
        ]

    def _sections(self, ended: bool) -> list[Section]:
        step, values = self.history.recent[-1]
        recent = sorted(row["step_s"] for _, row in self.history.recent if "step_s" in row)
        left_s = (self.steps - step) * recent[len(recent) // 2] if recent else 0.0
        state = "ended" if ended else f"running, about {timedelta(seconds=round(left_s))} left"
        facts = [("state", f"{state}, step {step} of {self.steps}"), ("written", time.strftime("%Y-%m-%d %H:%M:%S"))]
        facts += [(name, f"{value:.6g}") for name, value in values.items() if "/layer_" not in name and not name.startswith("length/")]
        newest, examples = Section(title="Newest step", facts=facts), _examples(self.path.with_name(EXAMPLES))
        shown = [Section(title="Best and worst answers to a problem", facts=examples)] if examples else []
        return [newest, *shown, Section(title="Configuration", facts=[], text=self.config)]


def _phases(row: Mapping[str, float]) -> dict[str, float]:
    """Seconds of an iteration by what was done; they add up to it.

    Where engines are ahead of the trainer, generation is beside the training, and what counts is the wait for its answers.
    """
    seconds = {
        name: row.get(f"{name}_s", 0.0) for name in ("to_generation", "generate", "to_training", "exchange", "pack", "score", "refit")
    }
    inside = ("to_generation", "generate", "to_training", "exchange")
    if "lag" in row and row["lag"] > 0:
        seconds |= dict.fromkeys(inside, 0.0)
    rollout, train = row.get("rollout_s", 0.0), row.get("train_s", 0.0)
    # Engines that are ahead of a critic that trains alone lag by nothing.
    seconds["generate"] = min(seconds["generate"], rollout)
    seconds["wait"] = max(0.0, rollout - sum(seconds[name] for name in inside))
    seconds["update"] = max(0.0, train - seconds["pack"] - seconds["score"])
    known = sum(seconds.values())
    return {**seconds, "evaluate, save": max(0.0, row.get("step_s", known) - known)}


def _examples(path: Path) -> list[tuple[str, str]]:
    """The newest answers of a file, as facts; of a line that is cut short none."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = file.read().splitlines()
    facts = []
    for line in lines[-_NUM_EXAMPLES:]:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        facts.append((f"step {row['step']}, {row['env_id']}, reward {row['reward']:.4g}", f"{row['prompt']} | {row['answer']}"))
    return facts


def _known(curve: Callable[[str], tuple[list[float], list[float]]], **names: str) -> dict[str, tuple[list[float], list[float]]]:
    """The curves that have points, by their labels."""
    return {label: points for label, name in names.items() if (points := curve(name))[0]}
