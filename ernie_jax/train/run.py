"""A whole run: data, state or checkpoint, loop, export and pictures, in one folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import jax
import numpy as np

from ernie_jax.checkpoint import save_pretrained
from ernie_jax.config.parameters import count_parameters
from ernie_jax.config.run import RunConfig
from ernie_jax.data import Tokenizer, unigram_entropy
from ernie_jax.models import TextModel, batch_shardings
from ernie_jax.parallel.pipeline import Simulation, make_timetable, simulate
from ernie_jax.sharding import Layout
from ernie_jax.train.balance import BalanceHook, PlacementHook, check_placement
from ernie_jax.train.data import image_balance, open_data
from ernie_jax.train.flops import ModelCost, Peak, peak_flops
from ernie_jax.train.gradients import check_batch_size
from ernie_jax.train.hooks import CheckpointHook, EvalHook, Hook, LogHook, ProfileHook, SampleHook
from ernie_jax.train.imbalance import imbalance_guard
from ernie_jax.train.loop import Loop
from ernie_jax.train.pipeline_plot import plot_timetable
from ernie_jax.train.plots import plot_run
from ernie_jax.train.preemption import StopSignal
from ernie_jax.train.progress import Progress
from ernie_jax.train.records import Throughput, read_records, rewind_records
from ernie_jax.train.remat_choice import choose_remat, policy_name
from ernie_jax.train.resume import RunCheckpoints
from ernie_jax.train.stages import ModelStages
from ernie_jax.train.start import starting_state
from ernie_jax.train.state import TrainState, mesh_of, run_layout
from ernie_jax.train.step import make_eval_step, make_train_step, model_of


class Generate(Protocol):
    """Continues a prompt: training does not know how (serving does), so it is handed in."""

    def __call__(self, model: TextModel, tokenizer: Tokenizer, prompt: str, *, max_new_tokens: int) -> str:
        """The new text."""
        ...


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run came to; paths are absolute, losses in nats a token.

    `stopped` names the signal that ended the run early, None when it reached its last step. `unigram_entropy` is of the
    held-out labels: the loss of a model that knows token frequencies only.
    """

    steps: int
    loss: float | None
    eval_loss: float | None
    unigram_entropy: float | None
    tokens_per_s: float | None
    mfu: float | None
    skipped_steps: int
    resumed_from: int | None
    stopped: str | None
    sample: str | None
    workdir: str
    export: str | None
    plot: str | None


def train(run: RunConfig, workdir: Path, *, generate: Generate | None = None, say: Callable[[str], None] = print) -> RunResult:
    """Train in `workdir` until the last step, going on from its latest whole checkpoint when there is one.

    Writes `config.json`, `metrics.jsonl`, `tensorboard/`, `checkpoints/`, of a run with stages `plots/pipeline.png`, and at the end
    `export/`, `plots/`, `result.json`.

    Args:
      run: the configuration.
      workdir: the run's folder, one that all processes see.
      generate: continues the prompt of `config.sample`; None samples nothing.
      say: prints a line for the user.

    Raises:
      ValueError: sizes, files or a checkpoint that do not fit the configuration.
      NonFiniteError: too many steps in a row were not finite.
    """
    return _Trainer(run, workdir.resolve(), generate, say).train()


class _Trainer:
    """What the phases of one run share."""

    def __init__(self, run: RunConfig, workdir: Path, generate: Generate | None, say: Callable[[str], None]) -> None:
        self.workdir, self.generate, self.say = workdir, generate, say
        self.layout = run_layout(run, mesh_of(run))
        check_batch_size(run.batch_size, run.parts, self.layout)
        check_placement(run, self.layout)
        run, self.compiled = choose_remat(run, self.layout, say)
        self.run = run
        self.peak = peak_flops(list(self.layout.mesh.devices.flat))
        say(describe(run, self.layout, self.peak))
        workdir.mkdir(parents=True, exist_ok=True)
        self.data = open_data(run, workdir, self.layout)
        self.throughput = Throughput()
        self.eval_step = make_eval_step(run, self.layout)

    def train(self) -> RunResult:
        """Resume or start, run the loop, finish."""
        run, workdir, result = self.run, self.workdir, self.workdir / "result.json"
        with StopSignal() as stop, RunCheckpoints(run, workdir / "checkpoints", self.say) as checkpoints:
            state = checkpoints.resume(self.layout, self.data.batches)
            resumed = None if state is None else int(state.step)
            if resumed is not None and resumed >= run.steps and result.exists():
                self.say(f"The run in {workdir} has already reached step {resumed} of {run.steps}; raise config.steps to go on")
                return RunResult(**json.loads(result.read_text()))
            if resumed is not None:
                self.say(f"Resuming after step {resumed} of {run.steps}")
            if jax.process_index() == 0:
                (workdir / "config.json").write_text(json.dumps(run.to_dict(), indent=2) + "\n")
                if self.layout.mesh.shape["pipeline"] > 1:
                    plot_timetable({run.pipeline.schedule: _simulation(run, self.layout)}, workdir / "plots" / "pipeline.png")
                rewind_records(workdir / "metrics.jsonl", resumed or 0)
                result.unlink(missing_ok=True)
            state = self._loop(state or starting_state(run, self.layout), checkpoints, stop)
            checkpoints.wait()
            return self._finish(state, stop.received if int(state.step) < run.steps else None, resumed)

    def _loop(self, state: TrainState, checkpoints: RunCheckpoints, stop: StopSignal) -> TrainState:
        run = self.run
        show = Progress(run.steps, self.throughput, quiet=jax.process_index() > 0)
        guard = imbalance_guard(run, self.layout, self.compiled, self.say)
        hooks = [*([] if guard is None else [guard]), *self._hooks(checkpoints, show)]
        loop = Loop(
            step_fn=guard or self.compiled or make_train_step(run, self.layout),
            place=self._place,
            hooks=hooks,
            steps=run.steps,
            max_nonfinite=run.optimizer.max_nonfinite,
            last_checkpoint=checkpoints.latest,
            throughput=self.throughput,
            note=image_balance,
        )
        try:
            with show:
                return loop.run(state, self.data.batches, stop)
        finally:
            for hook in hooks:
                hook.close()

    def _hooks(self, checkpoints: RunCheckpoints, show: Progress) -> list[Hook]:
        run = self.run
        cost = ModelCost.of(run.model, run.seq_len, mtp_blocks=run.mtp_blocks)
        hooks: list[Hook] = [BalanceHook(run.moe.balance_window, read_records(self.workdir / "metrics.jsonl"))]
        hooks.append(LogHook(self.workdir, run.log_every, self.throughput, cost, self.peak, show.show))
        if run.profile.steps:
            hooks.append(ProfileHook(self.workdir / "profile", run.profile.start, run.profile.steps))
        if run.moe.placement_every:
            hooks.append(PlacementHook(run, self.layout, self.workdir / "plots"))
        if self.data.held_out is not None:
            hooks.append(EvalHook(run.eval.every, self._evaluate))
        if run.sample.prompt and self.generate is not None:
            hooks.append(SampleHook(run.sample.every, self._sample))
        hooks.append(CheckpointHook(run.checkpoint.every, checkpoints.save, checkpoints.check))
        return hooks

    def _place(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """This process's rows of a batch as its part of the global arrays."""
        shardings = batch_shardings(self.layout, multimodal=self.run.model.vision is not None)
        return {key: jax.make_array_from_process_local_data(sharding, batch[key]) for key, sharding in shardings.items()}

    def _evaluate(self, state: TrainState) -> dict[str, float]:
        """Held-out loss in nats a token: over all, and of a vision-language model by the kind of document."""
        assert self.data.held_out is not None
        parts = [self.eval_step(state, self._place(batch)) for batch in self.data.held_out]
        totals, scored = (np.stack(column).sum(0, dtype=np.float64) for column in zip(*jax.device_get(parts), strict=True))
        losses = {"eval_loss": float(totals.sum() / scored.sum())}
        for kind, total, count in zip(("text", "multimodal") if len(totals) > 1 else (), totals, scored, strict=False):
            if count:
                losses[f"eval_loss_{kind}"] = float(total / count)
        return losses

    def _sample(self, state: TrainState) -> str:
        assert self.generate is not None
        sample = self.run.sample
        return self.generate(
            model_of(self.run, self.layout, state), self.data.tokenizer, sample.prompt, max_new_tokens=sample.max_new_tokens
        )

    def _finish(self, state: TrainState, stopped: str | None, resumed: int | None) -> RunResult:
        """Export and pictures of a run that is done; only the figures of one that was stopped."""
        workdir, first = self.workdir, jax.process_index() == 0
        records = read_records(workdir / "metrics.jsonl")
        last = records[-1] if records else {}
        export = plot = entropy = None
        if stopped is None:
            if self.data.held_out is not None:
                entropy = unigram_entropy(self.data.held_out)
            export = workdir / "export"
            save_pretrained(model_of(self.run, self.layout, state), export)
            if first:
                self.data.save(export)
                plot = plot_run(records, workdir / "plots" / "training.png", unigram_entropy=entropy, title=workdir.name)
        result = RunResult(
            steps=int(state.step),
            loss=last.get("loss"),
            eval_loss=last.get("eval_loss"),
            unigram_entropy=entropy,
            tokens_per_s=self.throughput.overall or last.get("tokens_per_s"),
            mfu=last.get("mfu"),
            skipped_steps=int(state.skipped),
            resumed_from=resumed,
            stopped=stopped,
            sample=last.get("sample"),
            workdir=str(workdir),
            export=None if export is None else str(export),
            plot=None if plot is None else str(plot),
        )
        if first and stopped is None:
            (workdir / "result.json").write_text(json.dumps(asdict(result), indent=2) + "\n")
        return result


def describe(run: RunConfig, layout: Layout, peak: Peak) -> str:
    """What a run is about to do, in a few lines."""
    model, moe, schedule, mesh = run.model, run.model.moe, run.schedule, layout.mesh
    count = count_parameters(model)
    experts = "" if moe is None else f", {model.num_moe_layers} of {moe.num_experts} experts, {moe.num_experts_per_tok} chosen"
    further = f", {count.mtp:,} more in {run.mtp_blocks} multi-token-prediction blocks" if run.mtp_blocks else ""
    parts = f"in {run.parts} microbatches, computed in {run.computed_in}"
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1) or "one device"
    devices = f"{mesh.size} of {mesh.devices.flat[0].device_kind}"
    figure = "unknown" if peak.flops is None else f"{peak.flops:.3g} FLOP/s"
    lines = {
        "Model": f"{count.total:,} parameters, {count.active:,} active; {model.num_hidden_layers} layers{experts}{further}",
        "Mesh": f"{axes} ({devices}), ZeRO {run.mesh.zero}, rules {layout.rules.name}",
        "Batch": f"{run.batch_size} rows of {run.seq_len} tokens a step, {parts}",
        **_pipeline_line(run, layout),
        "Remat": policy_name(run.remat),
        "Schedule": f"{run.steps} steps, {schedule.kind}, peak {schedule.peak:g}, {schedule.warmup} steps of warm-up",
        "Peak": f"{figure}: {peak.source}",
    }
    return "\n".join(f"{name:9} {text}" for name, text in lines.items())


def _pipeline_line(run: RunConfig, layout: Layout) -> dict[str, str]:
    stages, settings = layout.mesh.shape["pipeline"], run.pipeline
    if stages == 1:
        return {}
    found, plan = _simulation(run, layout), ModelStages(run, layout).plan
    layers = " ".join(str(count) for count in plan.counts)
    return {
        "Pipeline": f"{settings.schedule}, {stages} stages x {settings.virtual_stages} with {layers} layer units, "
        f"{run.parts} microbatches: bubble {found.bubble:.0%}, at most {found.waiting.max()} inputs wait at a stage"
    }


def _simulation(run: RunConfig, layout: Layout) -> Simulation:
    """The run's schedule, with a backward that makes its activations again: three forwards long."""
    settings, stages = run.pipeline, layout.mesh.shape["pipeline"]
    table = make_timetable(settings.schedule, stages=stages, microbatches=run.parts, virtual_stages=settings.virtual_stages)
    return simulate(table, 1.0, 3.0)
