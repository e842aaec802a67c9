"""Object store in a folder, with hard links instead of copies if the disk supports them, and digests in threads.

An object is a file; its tag consists of inode, size and times. The folder .store/ contains unfinished files, the lock
for comparing and replacing objects, and the tags of verified files. The tags are needed because removing the folder of
a hard link's original changes the link's times: such a file is hashed once more and its new tag is remembered.

A file that was stored as a hard link shares its bytes with the caller's folder: write new files there, never into old
ones. `changed` detects such writes. `get` always copies, for the same reason; readers can avoid the copy with `place`.
"""

import contextlib
import errno
import json
import os
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from contract import checksums, json_object, ownership
from contract.faults import Fault
from tasks.store import folder as folders
from tasks.store.durable import copy, into_place, plainly, sync, tag_of, write_durably
from tasks.store.folder import File, Kept, Meter, Progress, checked, none, work_through

OWN = ".store"
FORGOTTEN = 24 * 3600  # seconds after which no living process uses a temporary file any more


@dataclass(frozen=True)
class LocalStore:
    root: Path

    @property
    def uri(self) -> str:
        """Address of the store: s3://bucket/prefix or file:///abs/path, without credentials."""
        return self.root.as_uri()

    def read(self, key: str) -> tuple[bytes, str] | None:
        """A small object and its tag; None if absent."""
        with plainly(self.root):
            try:
                with self._at(key).open("rb") as f:
                    return f.read(), tag_of(os.fstat(f.fileno()))
            except (FileNotFoundError, NotADirectoryError) as error:
                self._raise_unless_absent(error)
                return None

    def create(self, key: str, data: bytes) -> str | None:
        """Write only if absent, atomically. Returns the tag, or None if the object exists."""
        return self._store(key, data, lambda tag: tag is None)

    def replace(self, key: str, data: bytes, tag: str) -> str | None:
        """Write only over an object with this tag. Returns the new tag, or None if the object changed meanwhile."""
        return self._store(key, data, lambda now: now == tag)

    def write(self, key: str, data: bytes) -> str:
        """Write or overwrite the object. The write is atomic and durable."""
        tag = self._store(key, data, lambda _: True)
        assert tag is not None
        return tag

    def remove(self, key: str, tag: str | None = None) -> bool:
        """Remove the object; with a tag, only if it still has that tag. Returns whether it was removed."""
        target = self._at(key)
        with plainly(self.root), self._locked():
            now = self._tag(target)
            if now is None or tag not in (None, now):
                return False
            return self._unlink(target)

    def keys(self, prefix: str) -> dict[str, tuple[int, str]]:
        """Size and tag of every object below the prefix, by name relative to it."""
        with plainly(self.root):
            return {name: (status.st_size, tag_of(status)) for name, status in self._files(prefix)}

    def put(self, folder: Path, prefix: str, progress: Progress | None = None, kept: Kept = none) -> dict[str, File]:
        """Make the content below the prefix equal to the folder. A repeated transfer sends only missing content.

        Objects that the folder lacks are removed, except those with kept(name).
        """
        sources = folders.walk(folder)
        done: dict[str, File] = {}
        with plainly(self.root):
            self._sweep()
            meter = Meter(progress, sum(path.stat().st_size for path in sources.values()))
            targets = {name: self._at(prefix, name) for name in sources}

            def store(name: str) -> None:
                done[name] = self._take_in(sources[name], targets[name])
                meter.add(done[name].size)

            for name in self.keys(prefix).keys() - sources.keys():  # first, as a folder may replace an old file
                if not kept(name):
                    self._unlink(self._at(prefix, name))
            work_through([lambda name=name: store(name) for name in sources])
            for parent in {target.parent for target in targets.values()}:
                sync(parent)
            meter.end()
        return {name: done[name] for name in sources}

    def get(self, prefix: str, files: dict[str, File], folder: Path, progress: Progress | None = None) -> None:
        """Fetch the files into the folder, each verified. A repeated transfer fetches only missing content."""
        meter = Meter(progress, sum(file.size for file in files.values()))
        with plainly(folder), folders.exclusive(folder) as partials:
            targets = folders.inside(folder, files)

            def fetch(name: str) -> None:
                file, target = files[name], targets[name]
                if not folders.matches(target, file):
                    partial = partials / uuid.uuid4().hex
                    with self._open(prefix, name) as source, partial.open("wb") as f:
                        if copy(source, f) != file.sha256:
                            raise Fault(f"{self.link(prefix)}/{name}: its content differs from its record")
                    partial.replace(target)
                meter.add(file.size)

            work_through([lambda name=name: fetch(name) for name in files])
        meter.end()

    def changed(self, prefix: str, files: dict[str, File], deep: bool = False) -> dict[str, str]:
        """Problems of files that differ from their records: "missing", "size 3, not 4" or "content differs".

        A file with the recorded tag counts as unchanged. With `deep`, it is read and hashed instead.
        """
        known, verified = json_object.read_or_empty(self._verified_at(prefix)), {}

        def trusted(name: str, file: File, tag: str) -> bool:
            return not deep and (tag == file.tag or known.get(name) == [tag, file.sha256])

        def problem(name: str, file: File, tag: str) -> str:
            try:
                same = folders.sha256(self._at(prefix, name)) == file.sha256
            except FileNotFoundError:
                return "missing"
            if same:
                verified[name] = [tag, file.sha256]
            return "" if same else "content differs"

        listed = self.keys(prefix)
        with plainly(self.root):
            wrong = folders.differing(files, listed, trusted, problem)
            if verified:
                with contextlib.suppress(OSError):  # files of a read-only store are hashed every time
                    partial = self._partial()
                    write_durably(partial, json.dumps(known | verified).encode())
                    into_place(partial, self._verified_at(prefix))
        return wrong

    def place(self, prefix: str) -> Path | None:
        """The folder in which the files can be read directly, or None. Callers must never write there."""
        return self._below(prefix)

    def link(self, prefix: str) -> str:
        """URI of the content below the prefix."""
        return self._below(prefix).as_uri()

    def delete(self, prefix: str) -> int:
        """Remove everything below the prefix. Returns the number of bytes freed."""
        freed = 0
        with plainly(self.root):
            for name, status in list(self._files(prefix)):
                if self._unlink(self._at(prefix, name)):
                    freed += status.st_size
            self._verified_at(prefix).unlink(missing_ok=True)
        return freed

    def _at(self, *names: str) -> Path:
        name = checked("/".join(part for part in names if part))
        if name.split("/")[0] == OWN:
            raise Fault(f"{self.uri}: {name}: {OWN} is reserved for the store")
        return self.root / name

    def _below(self, prefix: str) -> Path:
        return self._at(prefix) if prefix else self.root

    def _tag(self, path: Path) -> str | None:
        try:
            return tag_of(os.lstat(path))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _open(self, prefix: str, name: str):
        try:
            return self._at(prefix, name).open("rb", buffering=0)
        except (FileNotFoundError, NotADirectoryError):
            raise Fault(f"{self.link(prefix)}/{name}: missing from the store; create it again") from None

    def _files(self, prefix: str) -> Iterator[tuple[str, os.stat_result]]:
        """Names of plain files and their status. Links are ignored, as they could lead out of the store."""
        folder = self._below(prefix)
        for here, subfolders, names in os.walk(folder, onerror=self._raise_unless_absent):
            if here == str(self.root) and OWN in subfolders:
                subfolders.remove(OWN)
            for name in names:
                path = os.path.join(here, name)
                with contextlib.suppress(FileNotFoundError):
                    status = os.lstat(path)
                    if os.path.isfile(path) and not os.path.islink(path):
                        yield os.path.relpath(path, folder), status

    def _raise_unless_absent(self, error: OSError) -> None:
        """Raise the error unless it means that the store does not contain the object."""
        if isinstance(error, NotADirectoryError) and not self.root.is_dir():
            raise NotADirectoryError(error.errno, error.strerror, str(self.root))
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise error

    def _store(self, key: str, data: bytes, allowed) -> str | None:
        target = self._at(key)
        with plainly(self.root):
            partial = self._partial()
            try:
                write_durably(partial, data)
                with self._locked():
                    if not allowed(self._tag(target)):
                        return None
                    into_place(partial, target)
                    tag = self._tag(target)
                sync(target.parent)
                return tag
            finally:
                partial.unlink(missing_ok=True)

    def _take_in(self, source: Path, target: Path) -> File:
        """Link or copy one file into place, hash the stored file, and make it durable."""
        real = os.path.realpath(source)
        partial = self._partial()
        try:
            if target.exists() and os.path.samefile(real, target):  # another link would only change its tag
                return File(target.stat().st_size, folders.sha256(target), tag_of(os.lstat(target)))
            try:
                os.link(real, partial)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ENOSPC, errno.EDQUOT):
                    raise
                digest = self._copy_in(source, partial, target)
            else:
                self._share(partial)
                with partial.open("rb", buffering=0) as f:
                    before = os.fstat(f.fileno())
                    digest = checksums.of_stream(f)
                    os.fsync(f.fileno())
                    after = os.fstat(f.fileno())
                if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
                    raise folders.written_meanwhile(source)
            if partial.exists():
                into_place(partial, target)
                partial.unlink(missing_ok=True)  # renaming one hard link onto another leaves both
            status = os.lstat(target)
            return File(status.st_size, digest, tag_of(status))
        finally:
            partial.unlink(missing_ok=True)

    def _copy_in(self, source: Path, partial: Path, target: Path) -> str:
        """Copy the file, unless an interrupted run has already stored the same content."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if os.lstat(target).st_size == source.stat().st_size:
                digest = folders.sha256(source)
                if folders.sha256(target) == digest:
                    return digest
        with source.open("rb", buffering=0) as f, partial.open("wb") as g:
            digest = copy(f, g)
            g.flush()
            os.fsync(g.fileno())
        return digest

    def _share(self, linked: Path) -> None:
        """Let the group of a shared store read a file that the caller made elsewhere, for example with umask 077."""
        root, file = self.root.stat(), linked.stat()
        if root.st_mode & stat.S_IWGRP and file.st_uid == os.geteuid():
            if file.st_gid != root.st_gid:
                os.chown(linked, -1, root.st_gid)
            linked.chmod(stat.S_IMODE(file.st_mode) | stat.S_IRGRP)

    def _partial(self) -> Path:
        """Return the path of a new file. If the group may write to the store, it may write to all new folders too."""
        with contextlib.suppress(FileNotFoundError):
            if self.root.stat().st_mode & stat.S_IWGRP:
                os.umask(os.umask(0o077) & 0o707)  # of this process and its children
        folder = self.root / OWN / "partial"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / uuid.uuid4().hex

    def _sweep(self) -> None:
        """Remove unfinished files of killed processes. The change time of an inode shows the age of a hard link too."""
        for path in self._partial().parent.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ctime < time.time() - FORGOTTEN:
                    path.unlink()

    def _locked(self) -> AbstractContextManager[None]:
        """The lock for one comparison and one rename. The lock of a dead process is released, on NFS too."""
        return ownership.locked(self._partial().parent.parent / "lock")

    def _unlink(self, path: Path) -> bool:
        """Remove a file, and the folders that it leaves empty. Returns False if another process has removed it."""
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        with contextlib.suppress(OSError):  # not empty, or gone
            while path.parent != self.root:
                path = path.parent
                path.rmdir()
        return True

    def _verified_at(self, prefix: str) -> Path:
        return self.root / OWN / "verified" / checksums.of(prefix)
