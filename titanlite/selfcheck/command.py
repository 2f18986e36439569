"""`titanlite check --machines`: tests of all processes of a job, one line of a table each."""

import hashlib
import json
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial

import torch

from titanlite.config.schema import Config
from titanlite.parallelize.lora import choose_trained
from titanlite.preflight import ResolvedConfig
from titanlite.runtime.errors import UserError
from titanlite.runtime.process_group import Ranks, process_group
from titanlite.runtime.versions import Facts, compare, facts_of
from titanlite.selfcheck import needs
from titanlite.selfcheck.clocks import check_clocks
from titanlite.selfcheck.devices import check_arithmetic, check_gpus
from titanlite.selfcheck.findings import Job, Result, describe, open_job, table_lines
from titanlite.selfcheck.folder import check_folder
from titanlite.selfcheck.links import check_bandwidths, check_neighbours, check_values
from titanlite.selfcheck.room import check_disk, check_memory

TIMEOUT = 120
"""Seconds that a rank waits for the others in one test."""

Tests = Iterator[tuple[str, Callable[[], Result | list[tuple[str, Result]]]]]


def main(config: Config, resolved: ResolvedConfig, ranks: Ranks, device: torch.device) -> None:
    """Run all tests on all ranks, and print the table on rank 0.

    Raises:
        UserError: a test failed. The error has no text, because the table has it.
    """
    with warnings.catch_warnings(), process_group(ranks, device, timeout_seconds=TIMEOUT):
        warnings.simplefilter("ignore", FutureWarning)  # of names of collectives that PyTorch 2.13 replaces
        job = open_job(ranks)
        began = time.perf_counter()
        failed = run(machine_tests(config, resolved, job, device), print if ranks.rank == 0 else lambda line: None)
        if ranks.rank == 0:
            took = timedelta(seconds=round(time.perf_counter() - began))
            end = f"{len(failed)} FAILED: {', '.join(failed)}" if failed else "no test failed"
            print(f"{end} (processes: {ranks.world_size}, hosts: {job.nodes}, time: {took})", flush=True)
    if failed:
        raise UserError("")


def run(all_tests: Tests, report: Callable[[str], object]) -> list[str]:
    """Run tests, report their lines, and return the names of those that failed.

    Raises:
        UserError: a test ended with an error on this rank, such as a collective that a rank never joined.
    """
    failed = []
    for name, test in all_tests:
        try:
            found = test()
        except Exception as error:
            where = f"rank {os.environ.get('RANK', 0)} on {platform.node()}"
            raise UserError(f"{name}: {where}: {type(error).__name__}: {describe(error)}") from error
        for part, result in found if isinstance(found, list) else [(name, found)]:
            for line in table_lines(part, result):
                report(line)
            if result.status == "FAILED":
                failed.append(part)
    return failed


def machine_tests(config: Config, resolved: ResolvedConfig, job: Job, device: torch.device) -> Tests:
    """Return the tests by name, in their order. All ranks run each together."""
    model = resolved.model.build()
    choose_trained(model, freeze_config=config.freeze, lora=config.lora)
    sizes = {"world_size": job.ranks.world_size, "local_world_size": job.ranks.local_world_size}
    url = config.checkpoint.folder or f"{config.job.dump_folder}/{config.job.name}/checkpoints"

    def memory() -> tuple[float, float]:
        state = needs.state_in_host_memory(config, model, **sizes, is_cpu=device.type == "cpu")
        return state, needs.staging_bytes(config, model, **sizes)

    def disk() -> list[needs.Need]:
        return needs.disk_needs(config, model, resolved.tokenizer, world_size=job.ranks.world_size, nodes=job.nodes)

    yield "versions, config", partial(check_software, facts_of(config.model_dump(mode="json"), device, os.environ))
    if job.ranks.world_size > 1:
        yield "collectives", partial(check_values, device, job)
        yield "links", partial(check_bandwidths, device, job)
        yield "neighbours", partial(check_neighbours, device, job)
    yield "clocks", partial(check_clocks, job)
    if config.checkpoint.enable:
        yield "checkpoint folder", partial(check_folder, url, job)
    yield "disk", partial(check_disk, disk, job)
    yield "host memory", partial(check_memory, memory, job)
    yield "arithmetic", partial(check_arithmetic, device, job)
    yield "GPUs", partial(check_gpus, device, job)


def check_software(facts: Facts) -> Result:
    """Compare versions, config and environment of all ranks."""
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    digest = hashlib.sha256(json.dumps(facts.config, sort_keys=True).encode()).hexdigest()[:12]
    return Result(f"{versions}; config {digest}", *(compare(facts) or ([], [])))
