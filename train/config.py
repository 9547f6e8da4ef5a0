"""A training run is one YAML: these dataclasses are its sections, and each field's docstring is its documentation.

`read` refuses unknown keys, wrong types and impossible values, with the nearest valid name, before any model is loaded.
`key=value` overrides use dotted names: `optim.learning_rate=3e-4`.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any, Literal

import yaml

from draftsmith.configs import locate
from draftsmith.drafters import kind_module
from draftsmith.drafters.base import Shape
from draftsmith.drafters.settings import parse
from draftsmith.drafters.vocabulary import Fill
from draftsmith.inference.form import Quantisation, check_form
from draftsmith.inference.placement import Placement
from draftsmith.inference.rendering import Reasoning
from draftsmith.inference.sampling import Sampler
from draftsmith.train import encodings
from draftsmith.train.guard import GuardConfig
from draftsmith.train.profiling import ProfileConfig
from draftsmith.train.rows import parse_source

Precision = Literal["auto", "bfloat16", "float32"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TargetConfig:
    path: str
    """A model folder, a hub id or a .gguf file."""
    revision: str | None = None
    """Of a hub id."""
    dtype: Literal["bfloat16", "float16", "float32", "float64"] = "bfloat16"
    """Type of the frozen target's weights and activations."""
    placement: Placement = "replicated"
    """Where its weights lie. replicated: whole in every process; device_map: spread by layers over all devices of the one process;
    fsdp and zero3: each decoder layer sharded over the processes (docs/training_targets.md says when to use which)."""
    quantisation: Quantisation | None = None
    """Of the decoder's matrices, by bitsandbytes: 8bit or 4bit (null: as the checkpoint has them)."""
    adapter: str | None = None
    """A LoRA adapter as peft saves it, a folder or a hub id: the drafter is made for the target with it."""
    merge_adapter: bool = False
    """Add the adapter to the weights instead of running it beside them."""
    trust_remote_code: bool = False
    """Run modelling code that comes with the checkpoint."""
    shape: Shape | None = None
    """The target's sizes, so that the drafter can be built and priced without the target; checked against it when it is loaded."""

    def __post_init__(self) -> None:
        check_form(self.path, self.placement, self.quantisation, self.adapter, self.merge_adapter)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    train: tuple[str, ...]
    """Conversations whose answers come from the target (see `draftsmith data`): files, folders or hub data sets, each with settings
    where wanted, `PATH?weight=2&limit=1000` for example (docs/data.md)."""
    max_length: int = 2048
    """Longer conversations are cut."""
    max_answer_tokens: int | None = None
    """Train on so many supervised tokens only, a random choice of conversations; for scaling studies."""
    max_bad_share: float = 0.05
    """Share of rows that may be unusable; more are an error. They are counted by reason either way."""
    salvage: bool = False
    """Of a file that is cut off, train on the complete records before the cut instead of stopping."""
    reasoning: Reasoning = "rows"
    """Of conversations that the template shows otherwise later on (it drops the reasoning of earlier answers): rows makes a row for
    each such answer, as the target saw it then; last keeps the row of the last answer only."""
    vocabulary: Literal["data", "start"] = "data"
    """Whose draft vocabulary is used: that of the most frequent supervised tokens, or that of the drafter which `start` names."""
    vocabulary_fill: Fill = "rank"
    """What happens if `drafter.draft_vocab_size` exceeds the number of different supervised tokens: rank fills up with the lowest
    ids (the tokenizer's own ranking) and says how many, none stops."""

    def __post_init__(self) -> None:
        if not self.train:
            raise ValueError("train is empty; give at least one file")
        for source in self.train:
            parse_source(source)
        if not 0 <= self.max_bad_share <= 1:
            raise ValueError(f"max_bad_share is {self.max_bad_share}; give a number from 0 to 1")
        if self.max_length < 8:
            raise ValueError(f"max_length is {self.max_length}; give 8 or more")
        if self.max_answer_tokens is not None and self.max_answer_tokens < 1:
            raise ValueError(f"max_answer_tokens is {self.max_answer_tokens}; give 1 or more, or leave it out")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FeaturesConfig:
    store: Literal["memory", "disk", "online", "hybrid"] = "online"
    """memory and disk: the target runs once over the data, ahead of training; hybrid: when a batch first asks for a sequence, and
    what it says is kept on disk; online: it runs in every step and nothing is kept."""
    folder: str | None = None
    """Where a disk or hybrid store lives; `draftsmith cache` fills it ahead of time. Kinds, layers and dtypes may share one."""
    dtype: encodings.Name = "target"
    """How states are stored. target: in the target's dtype, bit for bit; float8 (e4m3) and int8: eight bits and a scale per token
    and layer, and what training then sees, whatever the store (see docs/data_store.md for what it costs)."""
    top_k: int | None = None
    """Keep the target's so many likeliest tokens with their logits instead of its last state: far smaller where that is wide. The
    teacher then has its true probabilities on them and none elsewhere, a miss like a token outside the draft vocabulary (null: the
    last state, all tokens). Not for kinds that read the last state themselves."""
    capture_batch: int = 1
    """Conversations per target forward. 1: what the target says of a conversation depends on nothing else, and all stores give the
    same bits; more: faster where conversations are short and the device is large."""
    shard_mb: int = 256
    """Size of a file of the store, per layer, in the target's dtype."""
    prefetch: int = 2
    """Batches read ahead from disk while the model trains; 0: none."""

    def __post_init__(self) -> None:
        if (self.store in ("disk", "hybrid")) != (self.folder is not None):
            raise ValueError("folder belongs to store: disk or hybrid, and such a store needs one")
        for name in ("capture_batch", "shard_mb"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give 1 or more")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; give 1 or more, or leave it out")
        if self.prefetch < 0:
            raise ValueError(f"prefetch is {self.prefetch}; give 0 or more")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    name: Literal["muon", "adamw"] = "adamw"
    """muon: Muon for the matrices between embedding and head, AdamW for the rest; adamw: AdamW for everything."""
    learning_rate: float = 3e-4
    """Peak of the schedule, of AdamW."""
    muon_learning_rate: float = 3e-3
    """Peak of Muon's, scaled to match AdamW's update size (Liu et al. 2025, arXiv 2502.16982)."""
    betas: tuple[float, ...] = (0.9, 0.95)
    """AdamW's."""
    weight_decay: float = 0.0
    """AdamW's and Muon's, on matrices only."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Course of the learning rate behind the warm-up: down to `final` as a cosine or a line, at the peak throughout, or at the peak
    until a line leads down over the last `decay_share` of the steps (warm-up, stable, decay: Hu et al. 2024, arXiv 2404.06395)."""
    warmup: float = 0.04
    """Share of the steps with a rising learning rate."""
    decay_share: float | None = None
    """Share of the steps, at the end, in which wsd falls."""
    final: float = 0.1
    """Learning rate at the end, as a share of the peak; constant stays at the peak."""
    clip_norm: float = 1.0
    """Gradient norm above which gradients are scaled down."""
    ema: float | None = None
    """Decay per step of an exponential moving average of the weights, 0.99 for example (null: none). It is what is evaluated and
    saved as the drafter; training goes on with the weights themselves. Lower in the first steps (`train/average.py`)."""

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate < math.inf or not self.clip_norm > 0:
            raise ValueError("learning_rate and clip_norm must be above 0")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay is {self.weight_decay}; give 0 or more")
        if not 0 <= self.warmup < 1 or not 0 <= self.final <= 1:
            raise ValueError("warmup must be in [0, 1) and final in [0, 1]")
        if (self.schedule == "wsd") != (self.decay_share is not None):
            raise ValueError("decay_share belongs to schedule: wsd, and that schedule needs one")
        if self.decay_share is not None and not 0 < self.decay_share <= 1 - self.warmup:
            raise ValueError(f"decay_share is {self.decay_share}; give a number above 0, at most 1 - warmup")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"ema is {self.ema}; give a number between 0 and 1, or leave it out")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas is {list(self.betas)}; give two numbers in [0, 1)")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    epochs: float = 1.0
    """Passes over the data; may be a fraction."""
    max_minutes: float | None = None
    """Stop after so much wall time of training, over all resumes and without evaluation, or after `epochs` if that is sooner (null:
    no limit). The schedule follows whichever is nearer to its end, so the learning rate still gets there. How many steps fit in
    depends on the machine: such a run is not reproduced bit by bit."""
    batch_size: int | None = None
    """Conversations per process and micro-batch; 8 if `batch_tokens` is not given either."""
    batch_tokens: int | None = None
    """Instead: tokens per process and micro-batch, at most, to which conversations are packed; a longer one is alone."""
    activation_checkpointing: bool = False
    """Keep less of each layer of the drafter for backward and compute it again there: less memory, about a third more time."""
    accumulation: int = 1
    """Micro-batches per optimizer step."""
    precision: Precision = "auto"
    """Of the drafter's training arithmetic; auto is bfloat16 autocast where the hardware has it."""
    log_every: int = 10
    """Optimizer steps between two lines of metrics."""
    checkpoint_every: int = 500
    """Optimizer steps between two resumable checkpoints."""
    keep_checkpoints: int = 2
    """Older ones are deleted."""
    compile: Literal["auto"] | bool = "auto"
    """Compile the drafter's layers and the loss for training (`torch.compile`); auto does so on CUDA."""
    profile: ProfileConfig | None = None
    """Steps of which the main process writes down what takes its time, into profile/ in the run folder."""
    peak_tflops: float | None = None
    """Of the device, dense, in the training's precision, for `speed/mfu` (null: that of known GPUs, in bf16: `train/meter.py`)."""

    def __post_init__(self) -> None:
        if not self.epochs > 0:
            raise ValueError(f"epochs is {self.epochs}; give a number above 0")
        if self.max_minutes is not None and not 0 < self.max_minutes < math.inf:
            raise ValueError(f"max_minutes is {self.max_minutes}; give a number above 0, or leave it out")
        if self.batch_size is not None and self.batch_tokens is not None:
            raise ValueError(
                f"batch_size is {self.batch_size} and batch_tokens {self.batch_tokens}; give one of them, null for the other"
            )
        if self.batch_size is None and self.batch_tokens is None:
            object.__setattr__(self, "batch_size", 8)
        for name in ("accumulation", "log_every", "checkpoint_every", "keep_checkpoints"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give 1 or more")
        if self.peak_tflops is not None and not 0 < self.peak_tflops < math.inf:
            raise ValueError(f"peak_tflops is {self.peak_tflops}; give a number above 0, or leave it out")
        for name in ("batch_size", "batch_tokens"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give 1 or more")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    prompts: str
    """Held-out prompts (JSONL) for the real acceptance that is measured during training."""
    every: int = 500
    """Optimizer steps between two measurements; the last step is always measured."""
    num_prompts: int = 32
    """How many of them, evenly spread over the file."""
    max_new: int = 64
    """Tokens per answer."""
    depth: int = 5
    """K, drafted tokens per round (a drafter that cannot go so deep drafts as far as it can)."""
    temperature: float = 0.0
    """Of target and draft."""
    batch_size: int = 32
    """Prompts decoded together."""

    def __post_init__(self) -> None:
        for name in ("every", "num_prompts", "depth", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give 1 or more")
        if self.max_new < 2:  # the first token comes from the prefill: one token has no round to measure
            raise ValueError(f"max_new is {self.max_new}; give 2 or more")
        Sampler(self.temperature)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrackingConfig:
    tracker: Literal["wandb", "tensorboard", "none"] = "wandb"
    """Besides metrics.jsonl, which is always written. W&B runs offline where no key is set."""
    project: str = "draftsmith"
    """W&B project."""
    name: str | None = None
    """Of the run in W&B (null: that of the run folder)."""
    group: str | None = None
    """W&B shows runs of one group together."""
    tags: tuple[str, ...] = ()
    """Of the run in W&B, to filter by."""
    traces: int = 3
    """Held-out prompts whose decoding each evaluation writes down round by round (traces.jsonl, a table in W&B)."""
    upload_drafter: bool = True
    """Hand the best drafter to W&B as a model artifact when the run ends."""

    def __post_init__(self) -> None:
        for name in ("name", "group"):
            if getattr(self, name) == "":
                raise ValueError(f"{name} is empty; give a name, or leave it out")
        if self.traces < 0:
            raise ValueError(f"traces is {self.traces}; give 0 or more")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    output: str
    """The run folder; {kind} in it stands for the drafter's kind, for sweeps over several."""
    seed: int = 0
    """Of initial weights and data order."""
    start: str | None = None
    """A run or drafter folder with whose weights training begins (null: with what the kind makes of the target): same kind and
    sizes, for a target of the same sizes (docs/training_targets.md)."""
    target: TargetConfig
    drafter: dict[str, Any]
    """`kind`, and the fields of that kind's Config."""
    data: DataConfig
    features: FeaturesConfig = dataclasses.field(default_factory=FeaturesConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    loop: LoopConfig = dataclasses.field(default_factory=LoopConfig)
    eval: EvalConfig
    tracking: TrackingConfig = dataclasses.field(default_factory=TrackingConfig)
    guard: GuardConfig = dataclasses.field(default_factory=GuardConfig)

    def __post_init__(self) -> None:
        if "kind" not in self.drafter:
            raise ValueError("drafter has no kind; give for example kind: eagle3")
        settings = parse(kind_module(self.kind).Config, self.drafter_settings, "drafter")
        if self.data.vocabulary == "start" and self.start is None:
            raise ValueError(
                "data.vocabulary is start, and there is none; give start: FOLDER, or data.vocabulary: data"
            )
        if self.features.top_k is not None and settings.loss.divergence == "reverse_kl":
            raise ValueError(
                "features.top_k leaves the target no probability elsewhere, which divergence: reverse_kl takes the logarithm of; "
                "leave top_k out, or give another divergence"
            )

    @property
    def kind(self) -> str:
        return str(self.drafter["kind"])

    @property
    def drafter_settings(self) -> dict[str, Any]:
        return {name: value for name, value in self.drafter.items() if name != "kind"}


def read(path: str | Path, overrides: tuple[str, ...] | list[str] = ()) -> RunConfig:
    """Reads a YAML run config and applies `key=value` overrides; ValueError says what to change."""
    path = locate(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"config {path} cannot be read ({error.strerror}); give the path of a YAML file") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text; give the path of a YAML file") from error
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no settings; see configs/ for complete examples")
    for override in overrides:
        _apply(values, override)
    if isinstance(values.get("output"), str) and isinstance(values.get("drafter"), dict):
        values["output"] = values["output"].replace("{kind}", str(values["drafter"].get("kind")))
    return parse(RunConfig, values, str(path))


def to_yaml(config: RunConfig) -> str:
    """The complete, resolved config; reading it back gives the same run."""
    return yaml.safe_dump(to_plain(config), sort_keys=False, allow_unicode=True)


def to_plain(config: RunConfig) -> dict[str, Any]:
    """The same as mappings and lists."""
    plain: dict[str, Any] = _plain(dataclasses.asdict(config))
    return plain


def _apply(values: dict[str, Any], override: str) -> None:
    name, separator, text = override.partition("=")
    if not separator or not name:
        raise ValueError(f"override {override!r} is not of the form key=value, for example optim.learning_rate=3e-4")
    *sections, last = name.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ValueError(f"override {override!r}: {section!r} is a value, not a section")
    try:
        values[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"override {override!r}: the value is not valid YAML") from error


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value
