"""One file from a URL: into NAME.part, on from where the last attempt stopped, checked, and only then under its name."""

from __future__ import annotations

import errno
import http.client
import os
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from seng.lab.datasets.values import (
    CHUNK,
    Check,
    DataError,
    Report,
    silent,
    verify,
)

ATTEMPTS = 3  # in a row that bring nothing new
PAUSE = 1.0  # seconds before another
TIMEOUT = 30.0
FULL = (errno.ENOSPC, errno.EDQUOT)


class _CutOffError(Exception):
    """The connection failed; another attempt may go on."""


def _ask(url: str, have: int) -> Any:
    """The answer to a request for all but the first `have` bytes, or None where there are no more."""
    headers = {"User-Agent": "seng"} | (
        {"Range": f"bytes={have}-"} if have else {}
    )
    try:
        return urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=TIMEOUT
        )
    except urllib.error.HTTPError as refusal:
        if refusal.code == 416 and have:
            return None
        raise DataError(
            f"{url} answers {refusal.code} {refusal.reason}"
        ) from None
    except (OSError, http.client.HTTPException) as error:
        raise _CutOffError(
            getattr(error, "reason", None) or error or type(error).__name__
        ) from None


def _read_on(url: str, part: Path, report: Report) -> None:
    """Append to the part until the server has no more."""
    have = part.stat().st_size if part.exists() else 0
    response = _ask(url, have)
    if response is None:
        return
    with response:
        if response.status != 206:  # the whole file, whatever was asked for
            have = 0
        left = response.headers.get("Content-Length")
        total = have + int(left) if left else None
        with part.open("ab" if have else "wb") as out:
            while True:
                try:
                    chunk = response.read(CHUNK)
                except (OSError, http.client.HTTPException) as error:
                    raise _CutOffError(error) from None
                if not chunk:
                    break
                out.write(chunk)
                have += len(chunk)
                report(f"downloading {part.stem}", have, total)
    if total is not None and have < total:
        raise _CutOffError(f"{have:,} of {total:,} bytes came")


def _whole(url: str, part: Path, report: Report) -> None:
    idle = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            return _read_on(url, part, report)
        except _CutOffError as cut:
            idle = (
                0
                if part.exists() and part.stat().st_size > before
                else idle + 1
            )
            if idle == ATTEMPTS:
                begun = (
                    "; what came is kept, and the next attempt goes on from there"
                    if part.exists()
                    else ""
                )
                raise DataError(
                    f"{url} could not be read ({cut}){begun}"
                ) from None
        time.sleep(PAUSE)


def download(
    url: str, to: Path, checks: tuple[Check, ...], report: Report = silent
) -> None:
    """Verified, then renamed. A part is kept where the connection or the user stopped it, never where it cannot be right."""
    if to.exists():  # of an attempt that got so far
        verify(to, checks)
        return
    part = to.with_name(f"{to.name}.part")
    resumed = part.exists()
    try:
        _whole(url, part, report)
    except OSError as error:
        if (
            error.errno in FULL
        ):  # the space is worth more now than what has come
            part.unlink(missing_ok=True)
        raise
    try:
        verify(part, checks)
    except DataError as wrong:
        part.unlink()
        if not resumed:
            raise DataError(
                f"{url}: {wrong}".replace(part.name, to.name)
            ) from None
        return download(
            url, to, checks, report
        )  # the file may have changed between the two halves
    os.replace(part, to)
