"""`draftsmith cache`: fills the feature store of a run."""

import argparse
import dataclasses
import sys
from typing import Any

from draftsmith.scripts.commands.arguments import command, config_arguments, get_device, words


def add(commands: Any) -> None:
    parser = command(
        commands, "cache", "fill the feature store of a run, so that training need not run the target", run
    )
    config_arguments(parser)


def run(options: argparse.Namespace) -> None:
    from draftsmith import drafters
    from draftsmith.train.config import read
    from draftsmith.train.features import FeatureStore
    from draftsmith.train.run import load_target, load_training_sequences

    files, overrides = words(options)
    if len(files) > 1:
        raise ValueError(f"{len(files)} configs are given, {', '.join(files)}; give one, and settings as key=value")
    config = read(files[0], overrides)
    if config.features.store not in ("disk", "hybrid"):
        raise ValueError(
            f"the config's features.store is {config.features.store}; add features.store=disk features.folder=FOLDER"
        )
    target = load_target(config, get_device(options.device))
    sequences = load_training_sequences(config, target)
    layers = drafters.build(config.kind, config.drafter_settings, target.shape).feature_layers
    print(f"{config.features.folder}: {len(sequences):,} conversations", file=sys.stderr)
    FeatureStore(target, sequences, layers, dataclasses.replace(config.features, store="disk")).fill()
