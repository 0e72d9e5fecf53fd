"""The disk tier: what comes out of files is what went in, or nothing."""

from __future__ import annotations

import os
import random
import resource
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from baton.kvcache import KvCacheManager, PageAllocator, PrefixTree, page_file
from baton.kvcache.disk_tier import KNOWN_SECONDS, DiskTier
from baton.kvcache.host_tier import HostTier
from baton.kvcache.kv_groups import FULL
from baton.kvcache.page_keys import placeholder
from baton.rpc.errors import BatonError
from baton.step_cost import StepCost
from baton.worker.host_memory import takes_less
from baton.worker.page_directory import PageDirectory

SIZE, PAGE_BYTES = 4, 512
LAYOUT = b"l" * 32
TOKENS = list(range(100, 100 + 6 * SIZE))
WAIT_SECONDS = 10.0


class Node:
    """A host tier with a disk, whose calls are made when the test waits for them."""

    def __init__(
        self, path: Path, size: int = 2**20, pages: int = 32, layout: bytes = LAYOUT, images: bool = False
    ) -> None:
        cache = KvCacheManager(PageAllocator(pages), PrefixTree(SIZE, groups=(FULL,), images=images))
        first = KvCacheManager(PageAllocator(pages), PrefixTree(SIZE, groups=(FULL,), images=images))
        self.memory = memoryview(bytearray(pages * PAGE_BYTES))
        self.host = HostTier(first, cache, self)
        self.files = PageDirectory(path, size, self.page)
        self.disk = self.files.tier = DiskTier(self.host, self.files, layout, PAGE_BYTES)
        self.files.start(self.report)
        self.calls: list[object] = []
        self.now = 0.0

    def copy(self, number, pairs, up) -> None:
        raise AssertionError("nothing is demoted here")

    def page(self, page: int) -> memoryview:
        return self.memory[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]

    def report(self, call) -> None:
        self.calls.append(call)

    def wait(self) -> None:
        """Until nothing runs any more."""
        end = time.monotonic() + WAIT_SECONDS
        while self.disk.copies:
            assert time.monotonic() < end
            while self.calls:
                self.calls.pop(0)()
            time.sleep(0.001)
        self.host.cache.check()

    def settle(self) -> None:
        """Until the writing thread has nothing left, and its reports are made."""
        done = threading.Event()
        self.files._writes.put(done.set)
        assert done.wait(WAIT_SECONDS)
        self.wait()
        while self.calls:
            self.calls.pop(0)()

    def put(self, tokens=TOKENS, namespace: str = "") -> None:
        """The host tier is given these tokens, and they are written."""
        cache, rows = self.host.cache, len(tokens) // SIZE
        block_table = cache.hold(tokens, namespace, rows)
        begin = len(block_table)
        cache.extend(block_table, rows)
        for row in range(begin, rows):
            self.page(block_table.tables[0][row])[:] = content(tokens[: (row + 1) * SIZE], namespace)
        cache.commit(block_table, tokens, namespace)
        cache.release(block_table, 0)
        self.disk.offer(namespace, cache.encode(tokens))
        self.disk.tick(self.now)
        self.wait()

    def get(self, tokens=TOKENS, namespace: str = "") -> int:
        """Page indexes that the host tier holds after a read, each compared."""
        cache = self.host.cache
        key = cache.encode(tokens)
        self.now += 1.0
        self.disk.tick(self.now)
        rows = self.disk.readable(
            key, namespace, cache.match_length(key, namespace) // SIZE, len(tokens) // SIZE
        )
        self.disk.read(key, namespace, rows)
        self.wait()
        block_table = cache.hold(key, namespace)
        for row, page in enumerate(block_table.tables[0]):
            assert self.page(page) == content(tokens[: (row + 1) * SIZE], namespace), "another page's bytes"
        rows = len(block_table)
        cache.release(block_table, 0)
        cache.check(idle=True)
        return rows

    def close(self) -> None:
        self.files.close()


def content(tokens, namespace: str) -> bytes:
    return random.Random(f"{namespace} {list(tokens)}").randbytes(PAGE_BYTES)


@pytest.fixture
def node(tmp_path: Path):
    made: list[Node] = []

    def make(folder: str = "disk", **options) -> Node:
        made.append(Node(tmp_path / folder, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_what_was_written_is_read_by_the_next_process(node, tmp_path: Path):
    node().put()
    again = node()
    assert again.get() == 6
    assert (again.disk.counters.read_pages, again.disk.counters.reads) == (6, 1) and not again.disk.faults
    assert again.get([*TOKENS[:10], 1, 2, *TOKENS[12:]]) == 2
    assert {path.stat().st_mode & 0o777 for path in files(tmp_path)} == {0o600}
    assert (tmp_path / "disk").stat().st_mode & 0o777 == 0o700


def test_another_process_finds_them_while_both_run(node):
    one, other = node(), node()
    one.put()
    assert other.get() == 0
    other.files._scan()
    assert other.get() == 6
    longer = [*TOKENS, 1, 2, 3, 4]
    other.put(longer)
    assert other.disk.counters.written_pages == 1, "those that are there are not written again"
    one.files._scan()
    assert one.get(longer) == 7


@pytest.mark.parametrize("other", [{"layout": b"m" * 32}, {"namespace": "b"}])
def test_another_layout_or_namespace_finds_nothing(node, other: dict):
    node().put(namespace="a")
    namespace = other.pop("namespace", "a")
    again = node(**other)
    assert again.get(namespace=namespace) == 0 and not again.disk.counters.reads


def test_a_file_under_anothers_name_is_a_miss(node, tmp_path: Path):
    """Another tenant's, another layout's, an older one, the same tokens behind other ones."""
    others = [node("other", layout=b"m" * 32), node("tenant"), node("tokens"), node("earlier")]
    others[0].put()
    others[1].put(namespace="tenant")
    others[2].put([*TOKENS[:4], 0, *TOKENS[5:]])
    others[3].put(TOKENS[4:])
    for number, folder in enumerate(("other", "tenant", "tokens", "earlier")):
        own = node(str(number))
        own.put()
        key = own.host.cache.encode(TOKENS)
        name = own.disk._names_of("", key).name(2, 0)
        wrong = others[number]
        tokens, namespace = [
            (TOKENS, ""),
            (TOKENS, "tenant"),
            ([*TOKENS[:4], 0, *TOKENS[5:]], ""),
            (TOKENS[4:], ""),
        ][number]
        row = 1 if folder == "earlier" else 2
        theirs = wrong.disk._names_of(namespace, wrong.host.cache.encode(tokens)).name(row, 0)
        path = own.files._file(name)
        path.write_bytes(wrong.files._file(theirs).read_bytes())
        again = node(str(number))
        assert again.get() == 2, folder
        assert sum(again.disk.faults.values()) == 1 and not path.exists()


def test_a_file_torn_anywhere_is_a_miss(node, tmp_path: Path):
    first = node()
    first.put(TOKENS[:SIZE])
    (path,) = files(tmp_path)
    whole, rng = path.read_bytes(), random.Random(0)
    head = len(whole) - PAGE_BYTES
    lengths = [*range(head + 1), *(rng.randrange(head, len(whole)) for _ in range(40)), len(whole) - 1]
    flips = [*range(head), *(rng.randrange(head, len(whole)) for _ in range(40))]
    wrong = [whole[:length] for length in lengths]
    wrong += [whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :] for at in flips]
    wrong += [whole[:at] + bytes(len(whole) - at) for at in lengths if any(whole[at:])]
    wrong += [whole + b"\0", whole + whole, b""]
    reader = node()
    for number, each in enumerate(wrong, 1):
        path.write_bytes(each)
        reader.files._scan()
        assert reader.get(TOKENS[:SIZE]) == 0
        assert sum(reader.disk.faults.values()) == number and not path.exists()
    path.write_bytes(whole)
    reader.files._scan()
    assert reader.get(TOKENS[:SIZE]) == 1
    assert set(reader.disk.faults) == {"damaged", "other"}


def test_a_file_that_is_gone_or_cannot_be_read_is_a_miss(node, tmp_path: Path):
    node().put()
    reader = node()
    gone, directory = (
        reader.files._file(reader.disk._names_of("", reader.host.cache.encode(TOKENS)).name(row, 0))
        for row in (3, 1)
    )
    gone.unlink()
    assert reader.get() == 3
    assert reader.disk.faults == {"gone": 1}
    again = node()
    directory.unlink()
    directory.mkdir()
    assert again.get() == 1
    assert again.disk.faults == {"unreadable": 1, "gone": 1} or again.disk.faults == {"unreadable": 1}


def test_a_full_disk_costs_a_counter(node, tmp_path: Path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = node()
    resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE_BYTES, before[1]))
    try:
        writer.put()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert writer.disk.faults == {"full": 1, "paused": 5} and not files(tmp_path)
    assert node().get() == 0
    writer.files._paused = 0.0
    writer.put()
    assert node().get() == 6


def test_the_least_recently_used_make_room(node, tmp_path: Path):
    writer, limit = node(size=14 * 640, pages=64), 14 * 640
    prompts = [[number, *TOKENS[1:]] for number in range(6)]
    for number, prompt in enumerate(prompts):
        if number == 2:
            reader = node(size=limit)
            assert reader.get(prompts[0]) == 6  # used again, also by another process
            writer.files._scan()
        writer.put(prompt)
        assert sum(path.stat().st_size for path in files(tmp_path)) <= limit
        if number == 2:
            assert node().get(prompts[0]) == 6 and node().get(prompts[1]) < 6
    assert writer.files.evicted and node().get(prompts[5]) == 6 and node().get(prompts[1]) == 0


def test_what_is_damaged_is_removed_and_what_is_being_read_of_it_dropped(node, tmp_path: Path):
    writer = node()
    writer.put()
    writer.put(namespace="other")
    reader = node()
    cache = reader.host.cache
    key = cache.encode(TOKENS)
    reader.disk.read(key, "", 6)
    reader.host.withdraw("", key[: 4 * SIZE])
    reader.wait()
    assert cache.match_length(key) == 0
    reader.close()
    assert node().get() == 0 and node().get(namespace="other") == 6


def test_names_are_bound_to_all_that_comes_before():
    key = KvCacheManager(PageAllocator(1), PrefixTree(SIZE)).encode
    name = lambda tokens, namespace="", layout=LAYOUT, group=0: page_file.PageNames(  # noqa: E731
        layout, namespace, key(tokens), 4 * SIZE
    ).name(1, group)
    names = Counter(
        [
            name(TOKENS),
            name([1, *TOKENS[1:]]),
            name(TOKENS, "x"),
            name(TOKENS, "", b"m" * 32),
            name(TOKENS, group=1),
        ]
    )
    assert max(names.values()) == 1 and name(TOKENS[:8]) == name(TOKENS)
    assert all(len(bytes.fromhex(each.split("-")[0])) == 32 for each in names)


def test_a_directory_that_others_may_write_is_refused(tmp_path: Path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(BatonError, match="mode 700"):
        PageDirectory(tmp_path / "open", 1, lambda page: memoryview(b""))
    (tmp_path / "file").write_text("")
    with pytest.raises(BatonError, match="another directory"):
        PageDirectory(tmp_path / "file", 1, lambda page: memoryview(b""))


def test_unfinished_files_of_processes_that_are_gone_are_removed(node, tmp_path: Path):
    node().put()
    (found, *_) = files(tmp_path)
    part, young = (found.with_name(f".{found.name}.{end}.1.part") for end in "ab")
    part.touch()
    young.touch()
    os.utime(part, (1, 1))
    assert node().get() == 6
    assert young.exists() and not part.exists()


def test_pages_of_images_are_found_by_the_images(node):
    """Also where page borders cut them; what differs in one image's digest is another file."""
    for before in range(SIZE + 1):
        one, other = (
            [*range(before), *(placeholder(bytes(31) + bytes([last]), i) for i in range(9)), 5, 6, 7, 8, 9]
            for last in (1, 2)
        )
        whole = len(one) // SIZE
        one, other = one[: whole * SIZE], other[: whole * SIZE]
        node(f"disk {before}", images=True).put(one)
        again = node(f"disk {before}", images=True)
        assert again.get(other) == before // SIZE
        assert again.get(one) == whole
        assert again.get([*one[: before + 9], *range(50, 50 + len(one) - before - 9)]) == (before + 9) // SIZE


def test_what_is_damaged_is_not_read_until_its_files_are_gone(node, monkeypatch):
    """Nor is it written again meanwhile; files of another process that nobody has seen yet go too."""
    one, other = node(), node()
    one.put()
    gate = threading.Event()
    one.files._writes.put(gate.wait)  # the writing thread is busy
    one.host.withdraw("", one.host.cache.encode(TOKENS[:SIZE]))
    assert one.get() == 0
    one.disk.offer("", one.host.cache.encode(TOKENS))
    one.disk.tick(0.0)
    other.put(TOKENS[:SIZE] + TOKENS)
    gate.set()
    one.settle()
    assert files(one.files._path) == [] and one.get() == 0
    one.put()
    assert one.get() == 6


def test_a_disk_that_refuses_everything_ends_each_job(node, monkeypatch):
    one = node()
    one.put()
    for path in files(one.files._path):
        path.write_bytes(b"x" * path.stat().st_size)

    def refuse(*args, **options):
        raise OSError(30, "read-only file system")

    again = node()
    for name in ("unlink", "rename"):
        monkeypatch.setattr(Path, name, refuse)
    assert again.get() == 0 and again.get() == 0
    again.put(TOKENS[:SIZE] * 2)
    assert again.disk.copies == 0 and not again.disk._writing
    again.files._paused = 0.0
    again.put([7] * SIZE * 3)
    assert again.disk.faults["unwritable"] > 0


def test_other_files_of_the_directory_are_left_alone(node, tmp_path: Path):
    folder = tmp_path / "disk" / "go"
    folder.mkdir(parents=True, mode=0o700)
    (tmp_path / "disk").chmod(0o700)
    (folder / "google").mkdir()
    for name in ("go.mod", "x.part", "f" * 64 + "-0"):
        (folder / name).write_bytes(b"m" * 5000)
        os.utime(folder / name, (0, 0))
    one = node(size=4000)
    assert one.files.size == 0
    for number in range(8):
        one.put([number] * SIZE * 3)
    assert one.files.evicted and sorted(each.name for each in folder.iterdir()) == sorted(
        ["go.mod", "google", "x.part", "f" * 64 + "-0"]
    )


def test_several_processes_keep_to_the_size_together(node, tmp_path: Path):
    nodes = [node(size=64_000) for _ in range(8)]
    for number in range(60):
        nodes[number % 8].put([number] * SIZE * 6)
    assert sum(path.stat().st_size for path in files(tmp_path / "disk")) < 1.5 * 64_000


def test_asking_again_while_nothing_has_changed_costs_nothing(node, monkeypatch):
    one = node()
    one.put()
    other = node()
    key = other.host.cache.encode(TOKENS)
    assert other.disk.readable(key, "", 0, 6) == 6
    monkeypatch.setattr(type(other.files), "__contains__", lambda self, name: pytest.fail("asked again"))
    assert other.disk.readable(key, "", 0, 6) == 6


@pytest.mark.parametrize(("page_seconds", "reads"), [(0.001, True), (1.0, False)])
def test_a_disk_that_takes_longer_than_computing_is_left_alone_for_a_while(
    node, page_seconds: float, reads: bool
):
    node().put()
    other = node()
    other.host.pays = partial(takes_less, lambda: StepCost(fixed=0.0, row=0.0, key=0.0, token=0.01, pair=0.0))
    ended, key = other.disk.read_ended, other.host.cache.encode(TOKENS)
    other.disk.read_ended = lambda number, faults, _: ended(number, faults, page_seconds * len(faults))
    rows = lambda: other.host.promotable(key, "", 0, 6, disk=True)[0]  # noqa: E731
    assert rows() == 6, "nothing has been measured"
    other.get(TOKENS[: 2 * SIZE])
    assert rows() == (6 if reads else 2)
    other.disk.tick(other.now + KNOWN_SECONDS)
    assert rows() == 6


def test_a_read_that_nobody_waits_for_is_not_begun(node):
    one = node()
    one.put()
    other = node()
    gate = threading.Event()
    monkeypatched, other.files._read_page = other.files._read_page, lambda job, each: gate.wait() and "gone"
    key = other.host.cache.encode(TOKENS)
    other.disk.read(key, "", 2)
    late = other.disk.read(key, "", 6)
    late.running = False
    other.files._read_page = monkeypatched
    gate.set()
    other.wait()
    assert other.disk.faults["late"] == 6 or late.read_rows == 0


def test_a_read_waits_for_those_before_it(node):
    node().put()
    other = node()
    key = other.host.cache.encode(TOKENS)
    idle = other.disk.seconds(2)
    gate = threading.Event()
    read_page = other.files._read_page
    other.files._read_page = lambda job, each: gate.wait(WAIT_SECONDS) and read_page(job, each)
    other.disk.read(key, "", 4)
    assert other.disk.seconds(2) > idle
    gate.set()
    other.wait()
    assert not other.disk._reading


def test_what_is_being_removed_is_not_removed_twice(node, monkeypatch):
    """Many choices of a request may find the same pages damaged."""
    one = node()
    one.put()
    removals = []
    remove = one.files.remove
    monkeypatch.setattr(one.files, "remove", lambda *of: (removals.append(of), remove(*of)))
    first = one.host.cache.encode(TOKENS[:SIZE])
    for _ in range(8):
        one.disk.withdraw("", first)
    assert len(removals) == 1
    one.settle()
    one.disk.withdraw("", first)
    assert len(removals) == 2


def test_files_of_another_version_have_other_names(monkeypatch):
    names = []
    for version in (page_file._VERSION, page_file._VERSION + 1):
        monkeypatch.setattr(page_file, "_VERSION", version)
        names.append(page_file.PageNames(LAYOUT, "", bytes(4 * SIZE), 4 * SIZE).name(0, 0))
    assert names[0] != names[1]


def test_a_process_whose_neighbour_evicts_forgets_the_files_age(tmp_path: Path):
    tmp_path.chmod(0o700)
    directory = PageDirectory(tmp_path, 10**9, lambda page: memoryview(b""))
    for number in range(3000):
        name = f"{number:064x}-0"
        path = tmp_path / name[:2] / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(10))
        if number % 100 == 99:
            directory._scan()
            for each in files(tmp_path)[:-1]:
                each.unlink()
    directory._scan()
    assert directory.size == 10 and len(directory._by_age) < 1200


@pytest.mark.parametrize("used", [(), (0, 5)])
def test_many_files_are_evicted_by_age_without_being_sorted(tmp_path: Path, used: tuple[int, ...]):
    """What was read since it was found counts as young."""
    names = [f"{number:064x}-0" for number in range(300)]
    made = random.Random(0).sample(names, len(names))
    for at, name in enumerate(made):
        path = tmp_path / name[:2] / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(10))
        os.utime(path, (1000 + at, 1000 + at))
    tmp_path.chmod(0o700)
    directory = PageDirectory(tmp_path, 3000, lambda page: memoryview(b""))
    for number in used:
        directory._known[made[number][:2]][made[number]] = 10, time.time()
    directory._evict(100)
    kept = {name for name in made if name in directory}
    assert len(kept) == (2850 - 100) // 10 and directory.size == 2750 and directory.evicted == 25
    gone = [number for number, name in enumerate(made) if name not in kept]
    assert gone == [number for number in range(25 + len(used)) if number not in used]
    assert sorted(path.name for path in files(tmp_path)) == sorted(kept)
