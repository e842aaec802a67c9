"""Upload of a folder to S3: files up to 16 MiB in one request, larger ones in parts, by several threads.

Each file is read twice: first for its SHA-256 (stored as metadata of the object, so it must be known first) and the
CRC32 of every part, then for sending. The store compares the received parts with the CRCs. The file's time is checked
before its upload is completed: a file that has changed is not stored under a wrong digest.

An interrupted transfer resumes: objects with the right size and SHA-256 are kept, multipart uploads whose parts match
the file are continued, and uploads of a changed file are aborted. Memory: one part per thread, 256 MiB at most; a file
above 160 GB has larger parts, as S3 allows 10,000 at most.
"""

import base64
import contextlib
import functools
import hashlib
import itertools
import threading
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contract.faults import Fault
from tasks.store import folder as folders
from tasks.store.durable import plainly as disk_plainly
from tasks.store.folder import BLOCK, File, Kept, Meter, Progress, Task, none, work_through
from tasks.store.s3_bucket import S3Bucket, tag_of
from tasks.store.s3_errors import Refused, code_of, plainly

PART = 16 << 20  # S3 requires at least 5 MiB; each request has about 30 ms without data
RESTARTS = 3  # of a multipart upload that another process aborted


@dataclass
class Upload:
    """Upload of one file."""

    name: str
    path: Path
    key: str
    moment: tuple[int, int]  # size and time of the last write, when the transfer began
    sha256: str = ""
    crcs: list[int] = field(default_factory=list)
    part: int = PART
    id: str = ""
    resumed: bool = False
    restarts: int = 0
    sent: dict[int, str] = field(default_factory=dict)  # ETags by part number, from 1
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def size(self) -> int:
        return self.moment[0]


class S3Upload(S3Bucket):
    """A bucket to which folders can be uploaded."""

    def put(self, folder: Path, prefix: str, progress: Progress | None = None, kept: Kept = none) -> dict[str, File]:
        sources = folders.walk(folder)
        stored = self.keys(prefix)
        files = [Upload(name, path, self.at(prefix, name), moment(path)) for name, path in sources.items()]
        meter = Meter(progress, sum(file.size for file in files))
        done: dict[str, File] = {}
        with plainly(self), disk_plainly(folder):
            unfinished = self.uploads(prefix)
            job = Job(self, stored, unfinished, meter, done)
            begin = [functools.partial(job.begin, file) for file in files]
            work_through(interleaved(begin, [file.size for file in files]))
        with plainly(self):
            below = len(self.below(prefix))
            for key in unfinished.keys() - {self.at(prefix, name) for name in sources}:
                for upload in () if kept(key[below:]) else unfinished[key]:
                    self.abort(key, upload)
        self.remove_all(prefix, [name for name in stored.keys() - sources.keys() if not kept(name)])
        meter.end()
        return {name: done[name] for name in sources}


def interleaved(tasks: list[Task], sizes: list[int]) -> list[Task]:
    """Alternate large and small files, the largest first: large files are hashed while small ones are sent."""
    order = sorted(range(len(tasks)), key=lambda i: sizes[i])  # the last is taken first
    half = len(order) // 2
    turns = [i for pair in zip(order[:half], order[half : 2 * half], strict=True) for i in pair] + order[2 * half :]
    return [tasks[i] for i in turns]


@dataclass(frozen=True)
class Job:
    store: S3Bucket
    stored: dict[str, tuple[int, str]]
    unfinished: dict[str, list[str]]
    meter: Meter
    done: dict[str, File]

    def begin(self, file: Upload) -> Iterable[Task] | None:
        if file.size <= PART:
            data = file.path.read_bytes()
            self._unchanged(file)
            file.sha256 = hashlib.sha256(data).hexdigest()
            if not self._is_stored(file):
                self._send_whole(file, data)
            return None
        file.part = max(PART, -(-file.size // 10_000 // BLOCK + 1) * BLOCK if file.size > PART * 10_000 else PART)
        file.sha256, file.crcs = digests(file.path, file.part)
        self._unchanged(file)
        if self._is_stored(file):
            return None
        self._resume(file)
        return self._parts(file)

    def _parts(self, file: Upload) -> list[Task]:
        if not file.id:
            self._start(file)
        left = [number for number in range(1, len(file.crcs) + 1) if number not in file.sent]
        if not left:
            return [lambda: self._finish(file)]
        return [functools.partial(self._send_part, file, number) for number in reversed(left)]

    def _is_stored(self, file: Upload) -> bool:
        size, tag = self.stored.get(file.name, (None, ""))
        if size != file.size or self._stored_tag(file) != tag:
            return False
        self._finished(file, tag, file.size)
        return True

    def _stored_tag(self, file: Upload) -> str | None:
        """Tag of the object, if it has the content of the file."""
        with contextlib.suppress(Refused), plainly(self.store):
            head = self.store.client.head_object(Bucket=self.store.bucket, Key=file.key)
            same = head["ContentLength"] == file.size and head.get("Metadata", {}).get("sha256") == file.sha256
            return tag_of(head) if same else None

    def _finished(self, file: Upload, tag: str, counted: int) -> None:
        self.done[file.name] = File(file.size, file.sha256, tag)
        for upload in self.unfinished.get(file.key, ()):
            if upload != file.id:
                self.store.abort(file.key, upload)
        self.meter.add(counted)

    def _send_whole(self, file: Upload, data: bytes) -> None:
        request = {"Bucket": self.store.bucket, "Key": file.key, "Body": data, "Metadata": {"sha256": file.sha256}}
        if checksums(self.store):
            request["ChecksumSHA256"] = base64.b64encode(bytes.fromhex(file.sha256)).decode()
        self._finished(file, tag_of(self.store.client.put_object(**request)), file.size)

    def _start(self, file: Upload) -> None:
        request = {"Bucket": self.store.bucket, "Key": file.key, "Metadata": {"sha256": file.sha256}}
        if checksums(self.store):
            request["ChecksumAlgorithm"] = "CRC32"
        file.id = self.store.client.create_multipart_upload(**request)["UploadId"]
        file.sent, file.resumed = {}, False

    def _resume(self, file: Upload) -> None:
        """Continue the newest upload of this key whose parts all agree with the file."""
        for upload in reversed(self.unfinished.get(file.key, ())):
            try:
                pages = self.store.client.get_paginator("list_parts")
                listing = pages.paginate(Bucket=self.store.bucket, Key=file.key, UploadId=upload)
                parts = [part for page in listing for part in page.get("Parts", ())]
            except Exception as error:
                if code_of(error) == "NoSuchUpload":
                    continue
                raise
            if parts and all(self._is_sent(file, part) for part in parts):
                file.id, file.resumed = upload, True
                file.sent = {part["PartNumber"]: tag_of(part) for part in parts}
                self.meter.add(sum(part["Size"] for part in parts))
                return

    def _is_sent(self, file: Upload, part: dict[str, Any]) -> bool:
        number = part["PartNumber"]
        if number > len(file.crcs) or part["Size"] != part_size(file, number):
            return False
        if part.get("ChecksumCRC32"):
            return part["ChecksumCRC32"] == crc_text(file.crcs[number - 1])
        return hashlib.md5(read_part(file, number), usedforsecurity=False).hexdigest() == tag_of(part)

    def _send_part(self, file: Upload, number: int) -> Iterable[Task] | None:
        upload = file.id
        data = read_part(file, number)
        request = {"Bucket": self.store.bucket, "Key": file.key, "UploadId": upload, "PartNumber": number, "Body": data}
        if checksums(self.store):
            request["ChecksumCRC32"] = crc_text(file.crcs[number - 1])
        try:
            tag = tag_of(self.store.client.upload_part(**request))
        except Exception as error:
            if code_of(error) != "NoSuchUpload":
                raise
            return self._restart(file, upload)
        with file.lock:
            if file.id != upload:
                return None
            file.sent[number] = tag
            self.meter.add(len(data))
            last = len(file.sent) == len(file.crcs)
        return [lambda: self._finish(file)] if last else None

    def _finish(self, file: Upload) -> Iterable[Task] | None:
        self._unchanged(file)
        parts: list[dict[str, Any]] = [{"PartNumber": n, "ETag": f'"{file.sent[n]}"'} for n in sorted(file.sent)]
        if checksums(self.store):
            for part in parts:
                part["ChecksumCRC32"] = crc_text(file.crcs[part["PartNumber"] - 1])
        try:
            answer = self.store.client.complete_multipart_upload(
                Bucket=self.store.bucket, Key=file.key, UploadId=file.id, MultipartUpload={"Parts": parts}
            )
        except Exception as error:
            if code_of(error) != "NoSuchUpload":
                raise
            tag = self._stored_tag(file)  # completed by an earlier try whose answer was lost, or by another process
        else:
            # The digest of a resumed upload is from its start. Unsent parts of the file may have changed since then.
            tag = self._stored_tag(file) if file.resumed else tag_of(answer)
        if tag is None:
            return self._restart(file, file.id)
        self._finished(file, tag, 0)
        return None

    def _restart(self, file: Upload, upload: str) -> Iterable[Task] | None:
        with file.lock:
            if file.id != upload:  # the thread of another part has restarted it
                return None
            if file.restarts == RESTARTS:
                raise Fault(
                    f"s3://{self.store.bucket}/{file.key}: its upload was aborted {RESTARTS} times; make sure that no "
                    "other process writes there and no lifecycle rule aborts uploads within hours"
                )
            file.restarts += 1
            self.meter.add(-sum(part_size(file, number) for number in file.sent))
            self._start(file)
        return self._parts(file)

    def _unchanged(self, file: Upload) -> None:
        if moment(file.path) != file.moment:
            raise folders.written_meanwhile(file.path)


def digests(path: Path, part: int) -> tuple[str, list[int]]:
    """The SHA-256 of the file and the CRC32 of each part, in one reading."""
    whole, crcs, block = hashlib.sha256(), [], memoryview(bytearray(BLOCK))
    with path.open("rb") as f:  # buffered: no read returns less than a block, so no block crosses a part's end
        for at in itertools.count(0, BLOCK):
            if not (length := f.readinto(block)):
                break
            whole.update(block[:length])
            if at % part == 0:
                crcs.append(0)
            crcs[-1] = zlib.crc32(block[:length], crcs[-1])
    return whole.hexdigest(), crcs


def part_size(file: Upload, number: int) -> int:
    return min(file.part, file.size - (number - 1) * file.part)


def read_part(file: Upload, number: int) -> bytes:
    size = part_size(file, number)
    with file.path.open("rb") as f:
        f.seek((number - 1) * file.part)
        data = f.read(size)
    if len(data) != size:
        raise folders.written_meanwhile(file.path)
    return data


def moment(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def crc_text(crc: int) -> str:
    return base64.b64encode(crc.to_bytes(4, "big")).decode()


def checksums(store: S3Bucket) -> bool:
    """Whether parts are sent with checksums. AWS_REQUEST_CHECKSUM_CALCULATION=when_required turns them off.

    That is for stores that do not support these headers.
    """
    return store.client.meta.config.request_checksum_calculation == "when_supported"
