"""How long a training step takes: rooflines of its operations, collectives, what hides them, and the pipeline's bubble.

- Compute is the sum of rooflines (`plan.operations`) of the layers' forward and backward passes, of what the policy computes again,
  and of the optimiser. The fullest device of an expert group counts, `EXPERT_SKEW` above the mean (assumed).
- Recomputed layers take the share of a forward pass that their recomputed FLOPs are of its FLOPs
  (`train.remat_prediction.extra_flops`). A pipeline's backward pass makes a chunk again as a whole, and once more what the policy
  says.
- Collectives take what `plan.links` says; which of it is hidden is said in `plan.overlap`.
- A pipeline is simulated with the costs of its stages, the embedding and a dense prefix in the first, the head in the last. Its
  bubble is what a device waits on average, so that uneven stages count in it.
- Fake CPU devices share the cores: a stage that waits costs nothing there, and the mean load of experts counts. The formulas for
  CPU rank meshes; they are not meant to tell seconds.

Not in it: reading the batch, saving checkpoints, the host's time to start kernels (but on CPU, where it is `CPU_LAYER_FLOPS`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ernie_jax.config.run import RunConfig
from ernie_jax.plan.abstract_layout import abstract_layout
from ernie_jax.plan.hlo import CollectiveUse
from ernie_jax.plan.operations import (
    CPU_LAYER_FLOPS,
    EXPERT_SKEW,
    UPDATE_BYTES,
    Operation,
    ShardSizes,
    StepWork,
    cpu_seconds,
    stage_loops,
)
from ernie_jax.plan.overlap import CommunicationTime, communication
from ernie_jax.plan.stage_time import StageCosts, layers_of_stages, pipeline_seconds
from ernie_jax.plan.topology import Topology
from ernie_jax.train.flops import ModelCost
from ernie_jax.train.gradients import counts_first
from ernie_jax.train.remat_prediction import StepShape, extra_flops

KINDS = ("compute", "exposed", "bubble", "hidden")
_GRADIENT_SUM_BYTES = 12  # a float32 sum and what is added to it, read, and the sum written


@dataclass(frozen=True)
class TimePart:
    """A named part of a step.

    Attributes:
      name: "attention", "dense MLPs", "experts", "router", "head", "vision", "recomputation", "gradient sums", "optimizer update",
        "bubble", or a collective's purpose and axes: "experts over expert".
      seconds: on an average device.
      kind: one of `KINDS`; "hidden" runs beside compute and takes no time of its own.
    """

    name: str
    seconds: float
    kind: str


@dataclass(frozen=True)
class StepTime:
    """A step of a run on a topology.

    Attributes:
      parts: in the order of a time line; those that are not hidden add up to `seconds`.
      tokens: of a step.
      model_flops: of a step, as `train.flops` counts them.
      peak_flops: FLOP/s of all devices in the compute format.
    """

    parts: tuple[TimePart, ...]
    tokens: int
    model_flops: float
    peak_flops: float

    def _of(self, kind: str) -> float:
        return sum(part.seconds for part in self.parts if part.kind == kind)

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.compute + self.exposed + self.bubble

    @property
    def compute(self) -> float:
        """Seconds in which a device computes, what it recomputes included."""
        return self._of("compute")

    @property
    def exposed(self) -> float:
        """Seconds in which it does nothing but communicate."""
        return self._of("exposed")

    @property
    def hidden(self) -> float:
        """Seconds of collectives that run beside compute."""
        return self._of("hidden")

    @property
    def bubble(self) -> float:
        """Seconds that it waits for other stages of the pipeline."""
        return self._of("bubble")

    @property
    def tokens_per_s(self) -> float:
        """On all devices."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Share of the peak that the model's FLOPs reach."""
        return self.model_flops / (self.seconds * self.peak_flops)

    @property
    def exposed_share(self) -> float:
        """Exposed communication as a share of the step."""
        return self.exposed / self.seconds


def predict_time(
    run: RunConfig, topology: Topology, collectives: Sequence[CollectiveUse], *, skew: float = EXPERT_SKEW
) -> StepTime:
    """The time of a run's training step on a topology.

    Args:
      run: with every size of its mesh given; `max_patches` says how many images a vision-language model's batches have.
      topology: whose devices the mesh fills.
      collectives: of one step, as `plan.step_collectives` predicts them or `plan.hlo` reads them.
      skew: load of the fullest device of an expert group over the mean.

    Raises:
      ValueError: a mesh that fits neither the model nor the topology; more stages than layers.
    """
    work = _work(run, topology, skew)
    network = communication(run, topology, collectives)
    layers = _Layers.of(work, topology)
    parts = layers.step_parts()
    passes = sum(part.seconds for part in parts)
    parts += [TimePart("loops of stages", stage_loops(run, topology.platform) * passes, "compute")]
    hidden = _hidden(network, passes)
    exposed_in_loop = sum(each.in_loop - hidden.get(id(each), 0.0) for each in network)
    bubble = 0.0 if topology.platform == "cpu" else _bubble(layers, passes, exposed_in_loop)
    parts += _updates(run, topology)
    parts += [TimePart(_name(each), each.in_loop + each.once - hidden.get(id(each), 0.0), "exposed") for each in network]
    parts += [TimePart("bubble", bubble, "bubble")]
    parts += [TimePart(_name(each), hidden[id(each)], "hidden") for each in network if hidden.get(id(each))]
    return StepTime(
        tuple(part for part in parts if part.seconds > 0),
        run.batch_size * run.seq_len,
        model_flops(run),
        topology.peak(work.dtype) * topology.devices,
    )


def stage_costs(run: RunConfig, topology: Topology, *, skew: float = EXPERT_SKEW) -> StageCosts:
    """Compute of one microbatch by virtual stage of a run with stages; collectives, which are spread as it is, left out."""
    return _Layers.of(_work(run, topology, skew), topology).costs(0.0)


def model_flops(run: RunConfig) -> float:
    """Model FLOPs of a step; of a vision-language model with full images: every patch that `max_patches` has room for."""
    cost = ModelCost.of(run.model, run.seq_len, mtp_blocks=run.mtp_blocks)
    tokens = run.batch_size * run.seq_len
    vision = run.model.vision
    if vision is None:
        return cost.step({"tokens": tokens})
    devices = run.mesh.data * run.mesh.expert * run.mesh.pipeline * run.mesh.tensor
    patches = (run.data.max_patches or 0) * devices * run.parts
    merged = min(tokens, patches / vision.spatial_merge_size**2)
    return cost.step({"tokens": tokens, "vision_tokens": merged, "patches": patches})


def _work(run: RunConfig, topology: Topology, skew: float) -> StepWork:
    platform = topology.platform
    shape = StepShape.of(run, abstract_layout(run), platform)
    return StepWork(run, shape, platform, 1.0 if platform == "cpu" else skew)


@dataclass(frozen=True)
class _Layers:
    """Seconds of one microbatch on a device, by kind of layer and part.

    Attributes:
      forward, backward: of a layer, kind -> part -> seconds.
      again: share of a forward pass that the remat policy computes again.
      head: of the head, forward and backward together.
      tower, tower_backward: of the vision tower.
      start: what it costs to start a layer's pass.
    """

    run: RunConfig
    forward: Mapping[str, Mapping[str, float]]
    backward: Mapping[str, Mapping[str, float]]
    again: float
    head: float
    tower: float
    tower_backward: float
    start: float

    @classmethod
    def of(cls, work: StepWork, topology: Topology) -> _Layers:
        run, model = work.run, work.run.model
        kinds = sorted(set(model.layer_kinds))
        ops = {kind: work.layer(kind) for kind in kinds}
        tower = work.tower()
        # `extra_flops` is of all devices, and takes every one of a pipeline's stages for one that has all layers.
        whole = extra_flops(run, work.shape, run.remat) / (run.parts * work.shape.devices)
        return cls(
            run,
            {kind: _by_part(topology, ops[kind]) for kind in kinds},
            {kind: _by_part(topology, [op.backward for op in ops[kind]]) for kind in kinds},
            min(1.0, whole / work.forward_flops),
            sum(op.seconds(topology) for op in work.head()),
            sum(op.seconds(topology) for op in tower),
            sum(op.backward.seconds(topology) for op in tower),
            cpu_seconds(topology, CPU_LAYER_FLOPS),
        )

    @property
    def recomputed(self) -> float:
        """Forward passes that a backward pass computes again."""
        return self.again + (1 if self.run.mesh.pipeline > 1 else 0)

    def step_parts(self) -> list[TimePart]:
        """Compute of a step on an average device."""
        run, counts = self.run, self.run.model.layer_kinds
        stages, parts = run.mesh.pipeline, run.parts
        share = parts / stages
        found: dict[str, float] = {}
        again = 0.0
        for kind in self.forward:
            layers = counts.count(kind) * share
            for part, seconds in self.forward[kind].items():
                found[part] = found.get(part, 0.0) + layers * (seconds + self.backward[kind][part])
                again += layers * seconds * self.recomputed
            again += layers * self.start * (2 + self.recomputed)
        if self.tower:
            # Images are spread over the stages too; in a pipeline rows are made first, and again in the backward pass.
            found["vision"] = parts * (self.tower + self.tower_backward)
            again += parts * self.tower * self.recomputed
        if counts_first(run):
            found["count of choices"] = sum(counts.count(kind) * share * sum(self.forward[kind].values()) for kind in self.forward)
        found["head"] = found.get("head", 0.0) + self.head * share
        if stages > 1:
            # The forward of the last virtual stage is not run on its own.
            again -= share * self.costs(0.0).saved
        return [*(TimePart(name, s, "compute") for name, s in found.items()), TimePart("recomputation", again, "compute")]

    def costs(self, exposed: float) -> StageCosts:
        """Of the pipeline's stages; `exposed` seconds of collectives a microbatch are spread as the work is."""
        chunks, before, behind = layers_of_stages(self.run)
        last = len(chunks) - 1
        forward, backward = [], []
        for k, chunk in enumerate(chunks):
            layers = dict(chunk)
            for edge, at in ((before, 0), (behind, last)):
                if k == at:
                    layers = {kind: layers.get(kind, 0) + edge.get(kind, 0) for kind in {*layers, *edge}}
            f = sum(count * sum(self.forward[kind].values()) for kind, count in layers.items())
            b = sum(count * sum(self.backward[kind].values()) for kind, count in layers.items()) + f * self.recomputed
            forward.append(f)
            backward.append(b + (self.head if k == last else 0.0))
        # The forward of the last virtual stage is the beginning of its backward.
        saved, forward[last] = forward[last], 0.0
        scale = 1 + exposed * self.run.mesh.pipeline / (sum(forward) + sum(backward))
        stages = self.run.mesh.pipeline
        return StageCosts(stages, tuple(f * scale for f in forward), tuple(b * scale for b in backward), saved)


def _by_part(topology: Topology, ops: Sequence[Operation]) -> dict[str, float]:
    found: dict[str, float] = {}
    for op in ops:
        found[op.part] = found.get(op.part, 0.0) + op.seconds(topology)
    return found


def _bubble(layers: _Layers, passes: float, exposed: float) -> float:
    """Seconds that an average device waits within the pipeline."""
    run = layers.run
    if run.mesh.pipeline == 1:
        return 0.0
    costs = layers.costs(exposed / run.parts)
    return pipeline_seconds(run, costs) - run.parts * sum(costs.work) / costs.stages


def _hidden(network: Sequence[CommunicationTime], compute: float) -> dict[int, float]:
    """id -> seconds hidden, no more in all than there is compute to hide behind."""
    wished = {id(each): each.in_loop * each.hideable for each in network}
    share = min(1.0, compute / total) if (total := sum(wished.values())) else 0.0
    return {key: seconds * share for key, seconds in wished.items()}


def _updates(run: RunConfig, topology: Topology) -> list[TimePart]:
    """What a step does to parameters beside the passes: sums of gradients over microbatches, and the optimiser."""
    sizes = ShardSizes.of(run)
    summed = run.parts * sizes.moments * _GRADIENT_SUM_BYTES if run.parts > 1 else 0.0
    return [
        TimePart("gradient sums", summed / topology.memory_bandwidth, "compute"),
        TimePart("optimizer update", sizes.moments * UPDATE_BYTES / topology.memory_bandwidth, "compute"),
    ]


def _name(each: CommunicationTime) -> str:
    return f"{each.purpose} over {each.axis}"
