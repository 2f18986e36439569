"""Retries of calls to object stores: what is repeated, for how long, and what is permanent."""

import time
from typing import Any

import pytest
import torch
from botocore.exceptions import ClientError, NoCredentialsError, PartialCredentialsError, ProfileNotFound

from tests.support.helpers import TinyRun, mentions
from tests.support.object_stores import s3_server_that_fails
from titanlite.checks.preflight import examine
from titanlite.runtime.errors import UserError
from titanlite.runtime.process_group import Ranks
from titanlite.storage.retry import AccessDenied, RetriesExhausted, retry
from titanlite.storage.storage import ObjectStorage, open_storage
from titanlite.tools import cli


def client_error(code: str, status: int) -> ClientError:
    return ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "GetObject")  # pyright: ignore


class Calls:
    """A call that raises each of these errors once, and then returns."""

    def __init__(self, *errors: Exception, seconds: float = 0.0) -> None:
        self.errors = [*errors]
        self.seconds = seconds
        self.count = 0

    def __call__(self) -> str:
        self.count += 1
        time.sleep(self.seconds)
        if self.errors:
            raise self.errors.pop(0)
        return "done"


def test_a_call_is_repeated_until_it_succeeds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    call = Calls(ConnectionError(), client_error("SlowDown", 503))
    assert retry(call, name="x") == "done"
    assert call.count == 3
    assert not caplog.records, "short hiccups are not reported"
    monkeypatch.setattr("titanlite.storage.retry.LOUD_AFTER", 0.0)
    assert retry(Calls(ConnectionError()), name="x") == "done"
    assert mentions(caplog.records[0].message, "x", "ConnectionError")


@pytest.mark.parametrize(
    "error",
    [
        NoCredentialsError(),
        PartialCredentialsError(provider="env", cred_var="AWS_SECRET_ACCESS_KEY"),
        ProfileNotFound(profile="nobody"),
        client_error("InvalidAccessKeyId", 403),
        PermissionError("Access Denied"),
    ],
)
def test_credentials_that_are_missing_or_wrong_are_not_tried_again(error: Exception) -> None:
    call = Calls(error)
    with pytest.raises(AccessDenied, match=r"^s3://bucket/x: .*credentials"):
        retry(call, name="s3://bucket/x")
    assert call.count == 1
    assert AccessDenied.exit_code == 2


@pytest.mark.parametrize("error", [FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError])
def test_errors_of_a_name_are_permanent(error: type[OSError]) -> None:
    call = Calls(error("of the store"))
    with pytest.raises(error, match=r"^s3://bucket/x: of the store$"):
        retry(call, name="s3://bucket/x")
    assert call.count == 1


@pytest.mark.long
def test_the_time_of_calls_counts_only_with_a_longest_time() -> None:
    with pytest.raises(RetriesExhausted, match=r"^x: .*\b0 s$"):
        retry(Calls(ConnectionError(), seconds=0.2), name="x", patience=0.2, longest=0.24)
    assert retry(Calls(ConnectionError(), seconds=0.2), name="x", patience=0.2) == "done"


@pytest.mark.long
def test_a_store_that_never_answers_is_named_at_once_and_given_up_in_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that answers 503 is in tests/distributed/test_checkpoints.py."""
    monkeypatch.setattr("titanlite.storage.retry.QUIET", 0.2)
    with s3_server_that_fails(lambda method, _: 0 if method == "PUT" else 200) as url:
        storage = open_storage(url, owner="me")
        assert storage.list() == {}
        caplog.clear()  # the import of the library may have taken long
        monkeypatch.setattr(ObjectStorage, "PATIENCE", 1.0)
        began = time.time()
        with pytest.raises(RetriesExhausted, match=rf"^{url}/step-00000001/.owner-me: .* 1 s$"):
            storage.begin("step-00000001")
        assert time.time() - began < 15
        assert caplog.records[0].message.startswith(url)


@pytest.mark.long
def test_a_part_of_an_object_may_come_with_the_checksum_of_the_whole() -> None:
    """Of rclone, and of Ceph before its fix: botocore would refuse it. Checkpoints have checksums of their own."""
    content = bytes(range(256))
    with s3_server_that_fails(lambda method, _: 206 if method == "GET" else 200, content) as url:
        assert open_storage(url).read("step-00000001/__0_0.distcp", 100, 20) == content[100:120]


@pytest.mark.long
def test_a_bucket_that_is_not_there_is_refused_before_training(tiny: TinyRun) -> None:
    """Some stores make a bucket of any name at the first save; with others, that save fails."""
    with s3_server_that_fails(lambda *_: 404) as url:
        with pytest.raises(UserError, match=rf"^{url}: there is no bucket bucket\b"):
            open_storage(url).list()
        config = tiny.config(f"--checkpoint.folder={url}")
        ranks = Ranks(rank=0, world_size=1, local_rank=0, local_world_size=1)
        for judge_memory, found in ((True, ["checkpoint.folder"]), (False, [])):
            _, problems = examine(config, ranks, torch.device("cpu"), judge_memory=judge_memory)
            assert [problem.key for problem in problems] == found


def test_a_pause_beyond_the_longest_time_ends_with_the_last_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine, or the random factor of pauses."""
    monkeypatch.setattr("titanlite.storage.retry.random.Random.uniform", lambda *_: 10.0)
    with pytest.raises(RetriesExhausted, match=r"^x: ConnectionError\(\), for 0 s$"):
        retry(Calls(ConnectionError()), name="x", longest=0.3)


@pytest.mark.long
def test_an_upload_without_an_answer_counts_as_long_as_it_takes() -> None:
    class ReadTimeoutError(Exception):
        """As botocore's."""

    with pytest.raises(RetriesExhausted, match=r"^x: ReadTimeoutError\(\).*\b0 s$"):
        retry(Calls(ReadTimeoutError(), seconds=0.2), name="x", patience=0.2)


@pytest.mark.long
def test_a_command_without_credentials_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """s3:// finds no credentials anywhere: not in the environment, not in files, not of the machine."""
    import s3fs

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    settings: dict[str, Any] = {
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
        "AWS_CONFIG_FILE": "/nonexistent",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        with pytest.raises(AccessDenied):
            open_storage("s3://no-such-bucket/run").list()
        assert cli.run(["checkpoint", "list", "s3://no-such-bucket/run"]) == 2
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: s3://no-such-bucket/run/: ")
    assert mentions(line, "credentials")
