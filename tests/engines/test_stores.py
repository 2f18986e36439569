"""Checkpoints in real servers of S3's protocol: s3_train.sh. README.md says how to install them."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.helpers import TinyRun, free_port, wait_until

pytestmark = pytest.mark.engines
KEY, SECRET = "probekey", "probesecret"


def rclone(folder: Path, port: int) -> list[str]:
    return ["rclone", "serve", "s3", "--auth-key", f"{KEY},{SECRET}", "--addr", f"127.0.0.1:{port}", str(folder)]


def weed(folder: Path, port: int) -> list[str]:
    identity = {"name": "test", "credentials": [{"accessKey": KEY, "secretKey": SECRET}], "actions": ["Admin"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    ports = (f"-{server}.port={free_port()}" for server in ("master", "volume", "filer"))
    grpc = (f"-{server}.port.grpc={free_port()}" for server in ("master", "volume", "filer", "s3"))  # else 10000 more
    config = f"-s3.config={folder / 's3.json'}"
    return ["weed", "server", f"-dir={folder}", "-ip=127.0.0.1", "-s3", f"-s3.port={port}", config, *ports, *grpc]


@pytest.mark.parametrize("command", [rclone, weed])
def test_a_run_in_a_store(tiny: TinyRun, tmp_path: Path, command: Callable[[Path, int], list[str]]) -> None:
    if shutil.which(command.__name__) is None:
        pytest.skip(f"needs {command.__name__}")
    import s3fs

    (store := tmp_path / "store").mkdir()
    (outputs := tmp_path / "outputs").mkdir()
    port = free_port()
    with open(tmp_path / "server.log", "w") as log:
        server = subprocess.Popen(command(store, port), stdout=log, stderr=log, cwd=tmp_path)
    environ = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET,
    }  # fmt: skip
    try:
        wait_until(lambda: _listens(port), 60)

        def make_bucket() -> bool:
            with suppress(OSError):
                fs = s3fs.S3FileSystem(
                    key=KEY, secret=SECRET, endpoint_url=environ["AWS_ENDPOINT_URL"], skip_instance_cache=True
                )
                fs.mkdir("bucket")
                return True
            return False

        wait_until(make_bucket, 60)  # SeaweedFS listens before it works
        script = Path(__file__).with_name("s3_train.sh")
        words = ["bash", script, sys.executable, tiny.toml, outputs, "s3://bucket/run"]
        ended = subprocess.run(words, env={**os.environ, **environ}, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    finally:
        server.kill()
        server.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
