"""Server of moto's S3 in a process of its own, so that its threads and its memory are not the test's.

python tests/support/s3_server.py prints its address and serves until its standard input ends.
"""

import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "AKIAMARKERMARKER",
    "AWS_SECRET_ACCESS_KEY": "secret-marker",
    "AWS_SESSION_TOKEN": "token-marker",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
}


@contextlib.contextmanager
def running(host: str = "127.0.0.1") -> Iterator[tuple[str, int]]:
    """Address and process id."""
    child = subprocess.Popen([sys.executable, __file__, host], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin and child.stdout
    try:
        yield child.stdout.readline().strip(), child.pid
    finally:
        child.stdin.close()
        child.wait(20)
        child.stdout.close()


def bucket_of_test(url: str, monkeypatch, kind: str = "bucket") -> tuple[Any, str]:
    """Make a bucket for one test, which sees this server in its environment; boto3's client and the bucket's name."""
    import boto3

    for key, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": url}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    client, name = boto3.client("s3"), f"{kind}-{secrets.token_hex(6)}"
    client.create_bucket(Bucket=name)
    return client, name


def make_bucket(environment: dict[str, str]) -> None:
    """Make the bucket that the tests' stores lie in."""
    import boto3

    names = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
    settings = {name: environment[name.upper()] for name in names}
    client = boto3.client("s3", endpoint_url=environment["AWS_ENDPOINT_URL"], region_name="us-east-1", **settings)
    client.create_bucket(Bucket="finetune")
    client.close()


if __name__ == "__main__":
    import logging

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer((sys.argv[1:] or ["127.0.0.1"])[0], port=0, verbose=False)
    server.start()
    print("http://{}:{}".format(*server.get_host_and_port()), flush=True)
    sys.stdin.read()
    os._exit(0)
