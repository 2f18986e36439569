"""The plan of a run's memory, made beside the run: by a child process, so that training neither waits for it nor is
touched by what goes wrong there.

    python -m titanlite.plan.forecast    reads a request, one line of JSON, and writes plan.json
"""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from titanlite.runtime.errors import RunError

if TYPE_CHECKING:  # the child reads its request before it imports torch
    import torch

    from titanlite.config.schema import Config
    from titanlite.runtime.process_group import Ranks

logger = logging.getLogger(__name__)

FILE = "plan.json"
PATIENCE = 60.0
"""Seconds that an explanation waits for a plan, and again for ways out."""
OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

Forecasted = dict[str, Any]
"""plan.json. `of`: what was planned (a hash). `memory`: bytes of the device. Then either `failed`, a text, or bytes:
`peak`, `breakdown` by cause, `usable` of the memory; `phase`, its name; `fits`; and `suggestions` with `options`,
`peak`, `fits` and `cost` of each. They are None as long as nobody asked for them,
and not `whole` as long as more may come."""


class Forecast:
    """Of one start of a run; does nothing before `start`.

    Args:
        memory: bytes of the device. None: what the GPU has; there is no forecast on a CPU then.
    """

    def __init__(self, config: "Config", ranks: "Ranks", device: "torch.device", *, memory: int | None = None) -> None:
        self.config = config
        self.ranks = ranks
        self.device = device
        self.folder = Path(config.job.dump_folder) / str(config.job.name)
        self._memory = memory
        self._child: subprocess.Popen[str] | None = None
        self.lock: IO[str] | None = None
        """Held by the rank that explains an error."""

    def start(self) -> None:
        """On rank 0: plan beside training, with ways out if the plan does not fit. The run's folder must be there."""
        if self.ranks.rank != 0:
            return
        try:
            (self.folder / FILE).unlink(missing_ok=True)
            if self._memory is not None or self.device.type != "cpu":
                self._start_child(advise=False)
        except Exception:
            logger.debug("the forecast of memory could not be started", exc_info=True)

    def poll(self) -> None:
        """Log what the child has found, once, when it is done. Never waits."""
        if self._child is None or self._child.poll() is None:
            return
        self.close()
        try:
            found = self._read()
            if found is None or "failed" in found:
                logger.debug(f"no forecast of memory: {found}")
            elif found["fits"]:
                logger.info(f"memory: predicted peak {gib(found['peak'])} of {gib(found['memory'])} GiB")
            else:
                logger.warning(warning_of(found))
        except Exception:
            logger.debug("the forecast of memory cannot be read", exc_info=True)

    def advised(self) -> Forecasted | None:
        """The plan with ways out, waiting for it; or as much of that as is known in time. On any rank."""
        if self._child or (self.device.type != "cpu" and self.ranks.rank != 0):
            self._wait_for_start()
        found = self._read()
        if found is None or ("failed" not in found and found["ways_out"] is None):
            self.close()
            self._start_child(advise=True)
            with suppress(subprocess.TimeoutExpired):
                assert self._child
                self._child.wait(2 * PATIENCE)
        self.close()
        return self._read()

    def close(self) -> None:
        """End the child, if it is there still."""
        if self._child is not None:
            child, self._child = self._child, None
            child.kill()
            child.wait()
            if child.stdin:
                with suppress(OSError):
                    child.stdin.close()

    def _wait_for_start(self) -> None:
        """For what rank 0 has been planning since the start; it may be a process of another rank."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if self._child and self._child.poll() is not None:
                return
            found = self._read()
            if found and ("failed" in found or found["fits"] or found["whole"]):
                return
            time.sleep(0.2)

    def _start_child(self, *, advise: bool) -> None:
        from titanlite.config.load import dump

        request = {
            "of": self._of(),
            "config": dump(self.config),
            "world_size": self.ranks.world_size,
            "nodes_of": self.ranks.local_world_size,
            "memory": self._bytes(),
            "gpu": self.device.type != "cpu",
            "advise": advise,
            "path": str(self.folder / FILE),
        }
        environment = {name: value for name, value in os.environ.items() if name not in OF_RANKS}
        self._child = subprocess.Popen(
            [sys.executable, "-m", "titanlite.plan.forecast"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            text=True,
        )
        assert self._child.stdin
        self._child.stdin.write(json.dumps(request) + "\n")
        self._child.stdin.flush()  # and stays open: its end is that of this process

    def _read(self) -> Forecasted | None:
        """What there is of this config."""
        try:
            found = json.loads((self.folder / FILE).read_text())
        except (OSError, ValueError):
            return None
        return found if found.get("of") == self._of() else None

    def _of(self) -> str:
        from titanlite.config.load import config_hash

        return f"{config_hash(self.config)} {self.ranks.world_size} {self._bytes()} {self.device.type}"

    def _bytes(self) -> int:
        if self._memory is not None:
            return self._memory
        import torch

        from titanlite.runtime.hardware import host_memory

        if self.device.type == "cpu":
            return host_memory() // self.ranks.local_world_size
        return torch.cuda.get_device_properties(self.device).total_memory


@contextmanager
def forecasting(config: "Config", ranks: "Ranks", device: "torch.device") -> Iterator[Forecast]:
    """A forecast that ends with the block. Where memory runs out within, the error tells what can be done.

    Raises:
        RunError: instead of torch.OutOfMemoryError.
    """
    import torch

    forecast = Forecast(config, ranks, device)
    try:
        yield forecast
    except torch.OutOfMemoryError as error:
        told = None
        try:
            from titanlite.plan.out_of_memory import explain

            told = explain(error, forecast)
        except Exception:
            logger.warning("the error that follows could not be explained:", exc_info=True)
        if told is None:
            raise
        raise RunError(told) from error
    finally:
        forecast.close()


def warning_of(found: Forecasted) -> str:
    """In one line, that a plan does not fit and what would."""
    ways = [way for way in found["ways_out"] or [] if way["fits"]][:3]
    hint = "try " + ", or ".join(f"{way['options']} ({gib(way['peak'])} GiB)" for way in ways)
    needs = f"this config is predicted to need {gib(found['peak'])} GiB at its peak ({found['phase']})"
    has = f"the GPU has {gib(found['memory'])}, of which {gib(found['usable'])} can be counted on"
    larger = "no option makes it fit; use more processes, and a higher shard degree"
    return f"memory: {needs}, {has}: {hint if ways else larger}"


def gib(size: float | None) -> str:
    """In GiB, without the unit; of little, three digits."""
    if size is None:
        return "-"
    return f"{size / 2**30:,.1f}" if size >= 2**30 else f"{size / 2**30:.3g}"


# The child


def main() -> None:
    """Plan what standard input asks for. Ends when standard input does, which is when the parent ends."""
    request = json.loads(sys.stdin.readline())
    if not request["advise"]:
        os.nice(19)  # else someone waits, and nothing is trained
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        for found in _plan(request):
            _write(request, found)
    except BaseException as error:
        _write(request, {"failed": f"{type(error).__name__}: {error}"})
        raise


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


def _write(request: dict[str, Any], found: Forecasted) -> None:
    from titanlite.runtime.files import write_atomically

    known = {"of": request["of"], "memory": request["memory"]}
    write_atomically(Path(request["path"]), json.dumps(known | found, indent=1))


def _plan(request: dict[str, Any]) -> Iterator[Forecasted]:
    """The plan, and then, where that is asked for or it does not fit, with ways out."""
    import tomli
    import torch

    from titanlite.config.schema import Config
    from titanlite.plan.estimate import USABLE, Layout, model_of, plan
    from titanlite.plan.suggestions import suggestions_so_far
    from titanlite.runtime.hardware import find_hardware

    torch.set_num_threads(1)
    config = Config.model_validate(tomli.loads(request["config"]))
    kind, args = model_of(config)
    # Its memory is what matters, and not how fast it is.
    hardware = replace(find_hardware("H100"), memory=request["memory"], measured=not request["gpu"])
    layout = Layout(request["world_size"], hardware, request["nodes_of"])
    present = plan(config, kind, args, layout)
    found: Forecasted = {
        "peak": present.peak,
        "phase": present.peak_phase,
        "breakdown": present.breakdown,
        "usable": round(USABLE * request["memory"]),
        "fits": present.fits,
        "ways_out": None,
        "whole": False,
    }
    yield found
    if request["advise"] or not present.fits:
        for ways in suggestions_so_far(config, kind, args, layout, present):
            found["ways_out"] = [way.record() for way in ways]
            yield found
        yield found | {"whole": True}


if __name__ == "__main__":
    main()
