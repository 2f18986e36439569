"""Profiles of several ranks."""

import gzip
import json
from collections import Counter

import pytest

from tests.support.helpers import TinyRun, run_in_turn
from tests.support.layouts import trained

UNITS = ("tok_embeddings", "layers.0", "head")
STEPS, WINDOW = 6, 2


@pytest.mark.nightly
def test_every_rank_writes_its_collectives(tiny: TinyRun) -> None:
    """Two ranks have the same losses with windows as without, and each has the collectives of each step."""
    options = ["--profiling.enable_profiling=true", "--profiling.profile_freq=6", "--profiling.profiler_active=2"]
    configs = [
        tiny.config(*options, "--compile.enable=true", "--job.name=on", world_size=2),
        tiny.config("--compile.enable=true", "--job.name=off", world_size=2),
    ]
    run_in_turn(trained, 2, configs)
    assert tiny.losses("on") == tiny.losses("off")
    for rank in (0, 1):
        path = tiny.folder / f"outputs/on/profile/step-{STEPS:08}/rank-{rank}.json.gz"
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        names = Counter(str(event.get("name")) for event in events)
        assert {name for name in names if name.startswith("ProfilerStep")} == {
            f"ProfilerStep#{step}" for step in (STEPS - 1, STEPS)
        }
        # 3 units in forward and 1 in backward; tok_embeddings and the head keep their parameters. One for metrics.
        assert names["gloo:all_gather"] >= 4 * WINDOW
        assert names["gloo:all_to_all"] == 3 * WINDOW
        kinds = "all_gather", "pre_backward", "post_backward_reduce"
        assert names.keys() >= {f"FSDP::{kind} ({unit})" for kind in kinds for unit in UNITS}
