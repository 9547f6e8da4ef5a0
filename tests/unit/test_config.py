"""Run configs: every broken setting is refused with its place and the nearest name, before anything is loaded."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from draftsmith import drafters
from draftsmith.drafters import settings
from draftsmith.train import config as configs
from draftsmith.train.config import RunConfig, read, to_yaml

SHIPPED = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
MINIMAL: dict[str, Any] = {
    "output": "runs/x",
    "target": {"path": "some/target"},
    "drafter": {"kind": "eagle3"},
    "data": {"train": ["a.jsonl"]},
    "eval": {"prompts": "p.jsonl"},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    return path


def test_defaults_complete_a_minimal_config(file: Path) -> None:
    config = read(file)
    assert (config.kind, config.seed, config.loop.batch_size, config.optim.learning_rate) == ("eagle3", 0, 8, 3e-4)
    assert config.features.store == "online" and config.data.train == ("a.jsonl",) and config.target.shape is None


BROKEN = [
    # override, part of the message
    ("ouput=x", "unknown key 'ouput'; did you mean 'output'? allowed: data, drafter, eval"),
    ("optim.lr=1", "optim: unknown key 'lr'"),
    ("optim.learning_rat=1", "optim: unknown key 'learning_rat'; did you mean 'learning_rate'?"),
    ("loop.batchsize=4", "loop: unknown key 'batchsize'; did you mean 'batch_size'?"),
    ("target.dtyp=float32", "target: unknown key 'dtyp'; did you mean 'dtype'?"),
    ("drafter.kind=eagel3", "drafter kind 'eagel3'; did you mean 'eagle3'?"),
    ("drafter.step=3", "drafter: unknown key 'step'; did you mean 'steps'?"),
    ("drafter.steps=0", "drafter: steps is 0; give 1 or more"),
    ("drafter.steps=true", "drafter.steps: expected int, got True"),
    ("drafter.layers=3", "drafter.layers: expected a list, got 3"),
    ("drafter.layers=[1, two]", "drafter.layers[1]: expected int, got 'two'"),
    ("drafter.draft_vocab_size=0", "draft_vocab_size is 0"),
    ("drafter={steps: 3}", "drafter has no kind; give for example kind: eagle3"),
    ("drafter=eagle3", "drafter: expected a mapping, got 'eagle3'"),
    ("target.dtype=int8", "target.dtype: 'int8' is not one of 'bfloat16', 'float16', 'float32', 'float64'"),
    ("target=llama", "target: expected a mapping of settings, got str"),
    ("target.path=3", "target.path: expected str, got 3"),
    ("target.shape={hidden_size: 8}", "target.shape: missing vocab_size, num_layers"),
    ("target.placement=ddp", "target.placement: 'ddp' is not one of 'replicated', 'device_map', 'fsdp', 'zero3'"),
    ("target.quantisation=2bit", "target.quantisation: '2bit' is not one of '8bit', '4bit'"),
    ("target.merge_adapter=true", "target: merge_adapter belongs to an adapter; give adapter: FOLDER_OR_ID"),
    (
        "target={path: t, quantisation: 4bit, placement: zero3}",
        "target: a target cannot be both quantised (4bit) and sharded (zero3)",
    ),
    (
        "target={path: t, quantisation: 4bit, adapter: a, merge_adapter: true}",
        "target: an adapter cannot be merged into a target of 4bit",
    ),
    ("data.vocabulary=old", "data.vocabulary: 'old' is not one of 'data', 'start'"),
    ("data.vocabulary=start", "data.vocabulary is start, and there is none; give start: FOLDER"),
    ("data.train=[]", "data: train is empty; give at least one file"),
    ("data.train=a.jsonl", "data.train: expected a list, got 'a.jsonl'"),
    (
        "data.train=['a.jsonl?wieght=2']",
        "data: source 'a.jsonl?wieght=2' has the setting 'wieght=2'; did you mean 'weight'?",
    ),
    ("data.max_bad_share=5", "data: max_bad_share is 5.0; give a number from 0 to 1"),
    ("data.max_length=4", "data: max_length is 4; give 8 or more"),
    ("data.max_answer_tokens=0", "max_answer_tokens is 0; give 1 or more, or leave it out"),
    ("features.store=ram", "features.store: 'ram' is not one of 'memory', 'disk', 'online', 'hybrid'"),
    ("features.store=disk", "features: folder belongs to store: disk or hybrid, and such a store needs one"),
    ("features.store=hybrid", "features: folder belongs to store: disk or hybrid, and such a store needs one"),
    ("features.folder=x", "features: folder belongs to store: disk or hybrid"),
    ("features.dtype=fp8", "features.dtype: 'fp8' is not one of 'target', 'float8', 'int8'"),
    ("features.prefetch=-1", "prefetch is -1; give 0 or more"),
    ("features.capture_batch=0", "capture_batch is 0; give 1 or more"),
    ("optim.learning_rate=0", "optim: learning_rate and clip_norm must be above 0"),
    ("optim.learning_rate=-1e-3", "learning_rate and clip_norm must be above 0"),
    ("optim.learning_rate=.nan", "learning_rate"),
    ("optim.learning_rate=.inf", "learning_rate"),
    ("optim.learning_rate=fast", "optim.learning_rate: expected a number, got 'fast'"),
    ("optim.clip_norm=0", "learning_rate and clip_norm must be above 0"),
    ("optim.warmup=1", "warmup must be in [0, 1) and final in [0, 1]"),
    ("optim.final=1.1", "warmup must be in [0, 1) and final in [0, 1]"),
    ("optim.betas=[0.9]", "betas is [0.9]; give two numbers"),
    ("optim.betas=[0.9, 1.0]", "betas is [0.9, 1.0]"),
    ("optim.weight_decay=-0.1", "weight_decay is -0.1"),
    ("optim.schedule=wds", "optim.schedule: 'wds' is not one of 'cosine', 'linear', 'constant', 'wsd'"),
    ("optim.schedule=wsd", "decay_share belongs to schedule: wsd, and that schedule needs one"),
    ("optim.decay_share=0.2", "decay_share belongs to schedule: wsd, and that schedule needs one"),
    ("optim={schedule: wsd, decay_share: 0}", "decay_share is 0.0; give a number above 0, at most 1 - warmup"),
    (
        "optim={schedule: wsd, decay_share: 0.8, warmup: 0.3}",
        "decay_share is 0.8; give a number above 0, at most 1 - warmup",
    ),
    ("optim.ema=0", "ema is 0.0; give a number between 0 and 1, or leave it out"),
    ("optim.ema=1", "ema is 1.0; give a number between 0 and 1, or leave it out"),
    ("loop.max_minutes=0", "max_minutes is 0.0; give a number above 0, or leave it out"),
    ("loop.max_minutes=.inf", "max_minutes is inf; give a number above 0, or leave it out"),
    ("loop.epochs=0", "loop: epochs is 0.0; give a number above 0"),
    ("loop.batch_size=0", "batch_size is 0; give 1 or more"),
    ("loop.accumulation=0", "accumulation is 0; give 1 or more"),
    ("loop.log_every=0", "log_every is 0; give 1 or more"),
    ("loop.checkpoint_every=0", "checkpoint_every is 0; give 1 or more"),
    ("loop.keep_checkpoints=0", "keep_checkpoints is 0; give 1 or more"),
    ("loop.batch_size=2.5", "loop.batch_size: expected int, got 2.5"),
    ("loop.precision=fp16", "loop.precision: 'fp16' is not one of 'auto', 'bfloat16', 'float32'"),
    ("eval.depth=0", "eval: depth is 0; give 1 or more"),
    ("eval.every=0", "every is 0; give 1 or more"),
    ("eval.num_prompts=0", "num_prompts is 0; give 1 or more"),
    ("eval.batch_size=-1", "batch_size is -1; give 1 or more"),
    ("eval.max_new=1", "max_new is 1; give 2 or more"),
    ("eval.temperature=-1", "temperature is -1.0; give 0 (greedy) or more"),
    ("eval={every: 3}", "eval: missing prompts"),
    ("tracking.tracker=wand", "tracking.tracker: 'wand' is not one of 'wandb', 'tensorboard', 'none'"),
    ("tracking.name=''", "tracking: name is empty; give a name, or leave it out"),
    ("tracking.traces=-1", "tracking: traces is -1; give 0 or more"),
    ("tracking.tags=eagle3", "tracking.tags: expected a list, got 'eagle3'"),
    ("loop.compile=yes please", "loop.compile: 'yes please' is not one of 'auto'"),
    ("loop.peak_tflops=0", "loop: peak_tflops is 0.0; give a number above 0, or leave it out"),
    ("loop.profile={start: 0}", "loop.profile: start is 0; give 1 or more"),
    ("loop.profile={steps: 0}", "loop.profile: steps is 0; give 1 or more"),
    ("guard.loss_above_uniform=0", "guard: loss_above_uniform is 0.0; give a number above 0"),
    ("guard.tau_gap=-1", "guard: tau_gap is -1.0; give a number above 0"),
    ("guard.ngram_after=2", "guard: ngram_after is 2.0; give a share from 0 to 1"),
    ("seed=one", "seed: expected int, got 'one'"),
    ("learning_rate", "override 'learning_rate' is not of the form key=value"),
    ("=3", "override '=3' is not of the form key=value"),
    ("seed.x=3", "override 'seed.x=3': 'seed' is a value, not a section"),
    ("optim.betas=[1", "override 'optim.betas=[1': the value is not valid YAML"),
]


@pytest.mark.parametrize("override, message", BROKEN, ids=[override for override, _ in BROKEN])
def test_a_broken_setting_is_refused_in_one_line_that_says_what_to_change(
    override: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**MINIMAL, "seed": 0}))
    with pytest.raises(ValueError) as caught:
        read(path, [override])
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", drafters.kinds())
def test_every_kind_refuses_an_unknown_setting_by_the_drafter_section(kind: str, file: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{file}: drafter: unknown key 'no_such_setting'")):
        read(file, [f"drafter={{kind: {kind}, no_such_setting: 1}}"])
    assert read(file, [f"drafter={{kind: {kind}}}"]).kind == kind


@pytest.mark.parametrize("section", ["output", "target", "drafter", "data", "eval"])
def test_a_missing_required_section_is_named(section: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({name: value for name, value in MINIMAL.items() if name != section}))
    with pytest.raises(ValueError, match=f"missing {section}$"):
        read(path)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "holds no settings"),
        (b"- a\n- b\n", "holds no settings"),
        (b"a: [1\n", "is not valid YAML"),
        (b"a: \xff\xfe\n", "is not"),
        (b"a:\n\tb: 1\n", "is not valid YAML"),
    ],
)
def test_a_file_that_is_no_config_is_refused_in_one_line(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read(path)
    assert message in str(caught.value) and "run.yaml" in str(caught.value) and "\n" not in str(caught.value)


def test_a_config_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere.yaml cannot be read"):
        read(tmp_path / "nowhere.yaml")


def test_the_output_may_name_the_kind(file: Path) -> None:
    config = read(file, ["output=runs/{kind}-1"])
    assert config.output == f"runs/{config.kind}-1"


def test_overrides_change_what_they_name_and_nothing_else(file: Path) -> None:
    plain = read(file)
    changed = read(
        file,
        ["optim.learning_rate=1e-3", "loop.batch_size=2", "data.train=[b.jsonl, c.jsonl]", "drafter.steps=5", "seed=7"],
    )
    assert changed == dataclasses.replace(
        plain,
        optim=dataclasses.replace(plain.optim, learning_rate=0.001),
        loop=dataclasses.replace(plain.loop, batch_size=2),
        data=dataclasses.replace(plain.data, train=("b.jsonl", "c.jsonl")),
        drafter={"kind": "eagle3", "steps": 5},
        seed=7,
    )


def test_the_last_override_wins_and_a_value_may_hold_an_equals_sign(file: Path) -> None:
    config = read(file, ["output=a", "output=b=c"])
    assert config.output == "b=c"


def test_a_number_written_as_yaml_reads_it_as_text_is_still_a_number(file: Path) -> None:
    assert read(file, ["optim.learning_rate=1e-3"]).optim.learning_rate == 0.001  # YAML 1.1 reads "1e-3" as a string
    assert read(file, ["optim.warmup=0"]).optim.warmup == 0.0


FULL = """
output: runs/ü
seed: 3
target:
  path: t
  revision: main
  dtype: float32
  shape: {hidden_size: 32, vocab_size: 64, num_layers: 8, intermediate_size: 64, num_heads: 4, num_kv_heads: 2, head_dim: 8}
drafter: {kind: eagle3, layers: [1, 2, 3], fc_norm: true, loss: {decay: 0.5}}
data: {train: [a.jsonl, b.jsonl], max_length: 64, max_answer_tokens: 1000}
features: {store: disk, folder: f, dtype: float8, capture_batch: 4}
optim: {betas: [0.8, 0.9], weight_decay: 0.01}
eval: {prompts: p.jsonl, temperature: 0.7}
tracking: {tracker: none}
"""


@pytest.mark.parametrize("text", [yaml.safe_dump(MINIMAL), FULL], ids=["minimal", "full"])
def test_a_written_config_reads_back_as_the_same_run(text: str, tmp_path: Path) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text(text, encoding="utf-8")
    config = read(first)
    second.write_text(to_yaml(config), encoding="utf-8")
    assert read(second) == config and to_yaml(read(second)) == to_yaml(config)
    sections = yaml.safe_load(to_yaml(config))
    assert sections.keys() == {
        field.name for field in dataclasses.fields(RunConfig)
    }  # complete: nothing left to defaults


def test_every_field_of_every_section_is_documented() -> None:
    source = Path(configs.__file__).read_text()
    for cls in (configs.TargetConfig, configs.DataConfig, configs.FeaturesConfig, configs.OptimConfig, configs.LoopConfig,
                configs.EvalConfig, configs.TrackingConfig):  # fmt: skip
        for field in dataclasses.fields(cls):
            assert re.search(rf'^    {field.name}: .*\n    """', source, re.M), f"{cls.__name__}.{field.name}"


def test_a_yaml_is_shipped_for_every_kind_and_three_targets() -> None:
    targets = ("smollm2", "qwen3_8b", "llama31_8b")
    others = {"eagle3_llama31_8b_lora", "eagle3_llama31_8b_finetune"}
    assert {path.stem for path in SHIPPED} == others | {f"{k}_{target}" for k in drafters.kinds() for target in targets}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_yaml_is_valid_and_its_header_says_how_to_launch_it(path: Path) -> None:
    config = read(path)
    assert path.stem.startswith(f"{config.kind}_")
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert any(f"configs/{path.name}" in line for line in header)
    if config.target.shape is not None:
        with torch.device("meta"):
            drafter = drafters.build(config.kind, config.drafter_settings, config.target.shape)
        assert sum(parameter.numel() for parameter in drafter.parameters()) > 1_000_000
        assert all(parameter.is_meta for parameter in drafter.parameters())


def test_the_nearest_name_is_offered_only_if_it_is_near() -> None:
    assert settings.nearest("stepz", ["steps", "decay"]) == "did you mean 'steps'? allowed: decay, steps"
    assert settings.nearest("q", ["steps", "decay"]) == "allowed: decay, steps"
