from __future__ import annotations

import json
import time

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.config.redact import redact, redact_message, without_credentials


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("http://ann:s3cret@host:5000/x", "http://ann:***@host:5000/x"),
        ("postgresql+psycopg://ann:p%40ss@db/mlflow", "postgresql+psycopg://ann:***@db/mlflow"),
        ("http://ann:p@ss:w@host:5000/x", "http://ann:***@host:5000/x"),
        ("redis://:only@host", "redis://:***@host"),
        ("two http://a:b@c and s3://d:e@f/g", "two http://a:***@c and s3://d:***@f/g"),
        ("https://host/x?sig=abc%2F&page=2", "https://host/x?sig=***&page=2"),
        (
            "https://host/x?X-Amz-Signature=abc&auth_token=d",
            "https://host/x?X-Amz-Signature=***&auth_token=***",
        ),
        ("id AKIAIOSFODNN7EXAMPLE.", "id ***."),
        ("aws_secret_access_key = wJalrXUtnFEMI/K7MDENG", "aws_secret_access_key = ***"),
        ("password: hunter2\nuser: ann", "password: ***\nuser: ann"),
        ('{"hf_token": "hf_x y", "a": 1}', '{"hf_token": "***", "a": 1}'),
        ("notify:\n  webhook: https://hooks.example/T0/B0/x\n", "notify:\n  webhook: ***\n"),
        ("notify:\n  webhook: $HOOK\n", "notify:\n  webhook: $HOOK\n"),
        ("password: $HOOK\n", "password: ***\n"),
        ("storage: {key: abc, endpoint: e}", "storage: {key: ***, endpoint: e}"),
        ("postgresql://mlflow:pa/ssWORD@db/mlflow", "postgresql://mlflow:***@db/mlflow"),
        ("mysql+pymysql://ann:a#b/c?d@host/db", "mysql+pymysql://ann:***@host/db"),
        ("s3://key:abc/def@bucket/p", "s3://key:***@bucket/p"),
        ("https://ghp_abcDEF0123456789xyz@github.com/x.git", "https://***@github.com/x.git"),
        ("git clone with ghp_abcDEF0123456789xyz", "git clone with ***"),
        ("hf_abcdefghijklmnopqrstuvwxyz0123456789 is no token", "*** is no token"),
        ("sk-proj-abcdefghijklmnop0123", "***"),
        ("eyJhbGciOiJIUzI1.eyJzdWIi.c2ln", "***"),
        ("AccountName=a;AccountKey=abcd==", "AccountName=a;AccountKey=***"),
        ("Authorization: Bearer abc.def", "Authorization: ***"),
        ("{'Authorization': 'Bearer abc'}", "{'Authorization': '***'}"),
        ("sent bearer abc12345.def", "sent bearer ***"),
        (
            "posting to https://hooks.slack.com/services/T0/B0/XY failed",
            "posting to https://hooks.slack.com/services/*** failed",
        ),
        ("https://discord.com/api/webhooks/12/abc", "https://discord.com/api/webhooks/***"),
        ("password: 12345678", "password: ***"),
        ("DB_PASS=hunter2", "DB_PASS=***"),
        ("pwd=hunter2", "pwd=***"),
        ("passphrase=abc", "passphrase=***"),
        ('password: "a\\"b"', 'password: "***"'),
        ("secret: 'cut off", "secret: *** off"),
        ("program --token abc --steps 3", "program --token *** --steps 3"),
        ("--api-key abc", "--api-key ***"),
        ("DATABRICKS dapi0123456789abcdef0123456789abcdef-2.", "DATABRICKS ***."),
        ("AIza" + "Sy0-_" * 7, "***"),
        ("//registry.npmjs.org/:_authToken=npm_" + "aB3" * 12, "//registry.npmjs.org/:_authToken=***"),
        ("with npm_" + "aB3" * 12, "with ***"),
        ("pypi-AgEIcHlwaS5vcmcCJGFiY2RlZg", "***"),
        ("nvapi-abcdefghijklmnopqrst0123", "***"),
        ("hvs.CAESIJabcdefghijklmnopqrst", "***"),
        ("Cookie: sid=abc123; theme=dark\nHost: a", "Cookie: ***\nHost: a"),
        ("Set-Cookie: sid=abc123; Path=/", "Set-Cookie: ***"),
        ('{"cookie": "sid=abc 123"}', '{"cookie": "***"}'),
        ("--header 'Cookie: sid=abc123; b=c' --x", "--header 'Cookie: ***' --x"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIa\n-----END", "-----BEGIN RSA PRIVATE KEY-----***-----END"),
    ],
)
def test_secrets_in_text_go(text: str, clean: str) -> None:
    assert redact(text) == clean
    assert redact(clean) == clean


@pytest.mark.parametrize(
    "text",
    [
        "http://host:5000/path",
        "abfs://container@account.dfs.core.windows.net/x",
        "sqlite:////work/a:b/mlflow.db",
        "tokenizer: gpt2.json",
        "tokens_per_second: 12.5",
        "tokens: 4096",
        "token: 12",
        "KeyError: 'abc'",
        "cookies.jsonl: cannot be read",
        "npm_config_cache is set",
        "pypi-mirror",
        "dapi0123",
        "monkey: business",
        "rank 3: keyboard interrupt",
        "http://127.0.0.1:5000/#/experiments/1?of=a@b",
        "https://host/x@y",
        "forward_pass: 3ms",
        "give --token or the variable",
        "a bearer authentication is asked for",
        "https://host/webhooks",
        "docs/webhooks/readme.md",
        "max_token=512",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize(
    ("line", "clean"),
    [
        ("notify.webhook: is not a URL; set it", "notify.webhook: is not a URL; set it"),
        ("key.yaml: steps: unknown key", "key.yaml: steps: unknown key"),
        ("--secret-env: A is given twice", "--secret-env: A is given twice"),
        ("a.uri s3://key:ab/cd@bucket: AccountKey=abc", "a.uri s3://key:***@bucket: AccountKey=***"),
    ],
)
def test_a_message_has_no_secrets_and_says_what_is_wrong(line: str, clean: str) -> None:
    assert redact_message(line) == clean


def test_secrets_in_mappings_go_by_their_key() -> None:
    job = {
        "tokenizer": "t.json",
        "token_count": 3,
        "storage": {"key": "abc", "secretAccessKey": "def", "apiKey": "x", "nested": [{"password": "p"}]},
        "uris": ("s3://a:b@c",),
        "empty": {"password": ""},
        "numbers": {"password": 1234, "key": 1, "secret": True},
        "headers": {"Authorization": "Basic abc"},
    }
    assert redact(job) == {
        "tokenizer": "t.json",
        "token_count": 3,
        "storage": {"key": "***", "secretAccessKey": "***", "apiKey": "***", "nested": [{"password": "***"}]},
        "uris": ("s3://a:***@c",),
        "empty": {"password": ""},
        "numbers": {"password": "***", "key": 1, "secret": True},
        "headers": {"Authorization": "***"},
    }


def test_a_long_text_takes_no_long_time() -> None:
    began = time.process_time()
    for text in (
        "x" * 200_000,
        "token_" * 30_000,
        "a.b-" * 50_000,
        "://" * 60_000,
        "?key" * 50_000,
        "://a:" * 50_000,
        "://a:" + "@" * 200_000,
        "/webhook" * 30_000,
        "://hooks." * 30_000,
        "--a-" * 50_000,
        "'" * 200_000,
    ):
        assert redact(text) == text
    assert time.process_time() - began < 5


SECRET = st.text("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ", min_size=8, max_size=20).map(
    lambda s: "Zq9" + s
)


@given(SECRET, st.sampled_from(["password", "api_key", "AWS_SECRET_ACCESS_KEY", "hf_token", "client-secret"]))
def test_documents_hide_what_their_mappings_hide(secret: str, key: str) -> None:
    document = {"outer": {key: secret, "uri": f"https://ann:{secret}@host/x"}}
    for text in (json.dumps(document), json.dumps(document, indent=2), yaml.safe_dump(document)):
        assert secret not in redact(text)
    assert secret not in json.dumps(redact(document))


@pytest.mark.parametrize(
    ("uri", "bare"),
    [
        ("https://host/a.txt?sig=ab/cd&se=1#x", "https://host/a.txt"),
        ("http://ann:pa/ss?#w@host:80/a.txt", "http://host:80/a.txt"),
        ("https://ghp_abc@host/a.txt", "https://host/a.txt"),
        ("s3://id:ab/cd@bucket/a.txt", "s3://bucket/a.txt"),
        ("az://box/a.jsonl?sv=1&sig=ab/cd", "az://box/a.jsonl"),
        ("abfs://box@account.dfs.core.windows.net/a", "abfs://box@account.dfs.core.windows.net/a"),
        ("s3://bucket/part-?.jsonl", "s3://bucket/part-?.jsonl"),
        ("gs://bucket/a@b:c@d", "gs://bucket/a@b:c@d"),
        (
            "zip://*.txt::simplecache::https://ann:x@host/a.zip?sig=b",
            "zip://*.txt::simplecache::https://host/a.zip",
        ),
        ("/data/what?sig=a#b", "/data/what?sig=a#b"),
        ("file:///data/a:b@c?d=e", "file:///data/a:b@c?d=e"),
        ("hf:base", "hf:base"),
    ],
)
def test_a_place_without_credentials(uri: str, bare: str) -> None:
    assert without_credentials(uri) == bare
    assert without_credentials(bare) == bare
