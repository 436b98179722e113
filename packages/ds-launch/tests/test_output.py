from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from ds_launch.output import Feed, RankLog, Sink, final_state


class Reader:
    """A sink on a pipe, and what arrives at its other end."""

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        self.sink = Sink(self.write_fd)
        self.got = b""

    def text(self) -> bytes:
        while self.sink.pending:
            self.sink.flush_some()
            self.got += os.read(self.read_fd, 1 << 20)
        return self.got


@pytest.fixture
def reader() -> Iterator[Reader]:
    reader = Reader()
    yield reader
    os.close(reader.read_fd)
    os.close(reader.write_fd)


def live(reader: Reader) -> Feed:
    return Feed(reader.sink, rank=0, tag=b"", live=True, log=None)


def tagged(reader: Reader, rank: int = 1) -> Feed:
    return Feed(reader.sink, rank=rank, tag=b"[r%d] " % rank, live=False, log=None)


def test_tagged_lines_wait_for_their_end(reader: Reader) -> None:
    feed = tagged(reader)
    feed.take(b"one\ntw", 0.0)
    assert reader.text() == b"[r1] one\n"
    feed.take(b"o\n\nthree", 1.0)
    assert feed.due_s() is None
    assert reader.text() == b"[r1] one\n[r1] two\n[r1] \n"
    feed.finish()
    assert reader.text().endswith(b"[r1] \n[r1] three\n")


def test_live_start_of_a_line_waits_50_ms(reader: Reader) -> None:
    feed = live(reader)
    feed.take(b"a\nb", 10.0)
    assert reader.text() == b"a\n"
    assert feed.due_s() == 10.05
    feed.tick(10.04)
    assert reader.text() == b"a\n"
    feed.tick(10.05)
    assert reader.text() == b"a\nb"
    feed.take(b"c\n", 11.0)
    assert reader.text() == b"a\nbc\n"


def test_live_bytes_are_unchanged(reader: Reader) -> None:
    data = b"\r 10%\r 20%\r100%\n\xff\xfe\x00\r\nend"
    feed = live(reader)
    for i in range(len(data)):
        feed.take(data[i : i + 1], 0.0)
    feed.finish()
    assert reader.text() == data


def test_live_progress_does_not_wait(reader: Reader) -> None:
    live(reader).take(b"\r 10%", 0.0)
    assert reader.text() == b"\r 10%"


def test_other_ranks_do_not_cut_a_line_in_two(reader: Reader) -> None:
    first, second = live(reader), tagged(reader)
    first.take(b"half ", 0.0)
    second.take(b"other\n", 0.01)
    first.take(b"whole\n", 0.02)
    assert reader.text() == b"[r1] other\nhalf whole\n"


def test_unfinished_line_shown_already_is_ended_before_another_rank(reader: Reader) -> None:
    first, second = live(reader), tagged(reader)
    first.take(b"prompt: ", 0.0)
    first.tick(1.0)
    second.take(b"other\n", 1.0)
    assert reader.text() == b"prompt: \n[r1] other\n"


def test_progress_bar_is_erased_on_a_terminal() -> None:
    master, slave = os.openpty()
    os.set_blocking(master, False)
    try:
        sink = Sink(slave)
        assert sink.is_terminal
        sink.write(0, b"", b"\r 50%")
        sink.write(1, b"[r1] ", b"x")
        while sink.pending:
            sink.flush_some()
        assert os.read(master, 100) == b"\r 50%\r\x1b[K[r1] x"
    finally:
        os.close(master)
        os.close(slave)


def test_tagged_progress_shows_its_last_state(reader: Reader) -> None:
    feed = tagged(reader)
    feed.take(b"\r 10%\r 50%\r100%\nplain\r\n", 0.0)
    assert reader.text() == b"[r1] 100%\n[r1] plain\n"


def test_endless_progress_of_a_tagged_rank_is_bounded_and_silent(reader: Reader) -> None:
    feed = tagged(reader)
    for i in range(20_000):
        feed.take(b"\r%6d" % i, 0.0)
    assert reader.text() == b""
    feed.take(b"\n", 0.0)
    assert reader.text() == b"[r1]  19999\n"


def test_very_long_line_arrives_whole_behind_one_tag(reader: Reader) -> None:
    feed = tagged(reader)
    for _ in range(40):
        feed.take(b"x" * 10_000, 0.0)
    feed.take(b"\n", 0.0)
    assert reader.text() == b"[r1] " + b"x" * 400_000 + b"\n"


def test_muted_feed_keeps_its_tail(reader: Reader) -> None:
    feed = tagged(reader)
    feed.muted = True
    feed.take(b"secret\n", 0.0)
    assert reader.text() == b""
    assert feed.tail == b"secret\n"


def test_tail_is_bounded(reader: Reader) -> None:
    feed = live(reader)
    feed.take(b"a" * 100_000 + b"end", 0.0)
    assert len(feed.tail) == 32_768
    assert feed.tail.endswith(b"aend")


def test_sink_fills_up(reader: Reader) -> None:
    assert not reader.sink.full
    reader.sink.write(0, b"", b"x" * (1 << 20))
    assert reader.sink.full


def test_sink_whose_reader_is_gone() -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    sink = Sink(write_fd)
    sink.write(0, b"", b"x")
    sink.flush_some()
    assert sink.problem == "Broken pipe"
    sink.write(0, b"", b"y")
    assert not sink.pending
    os.close(write_fd)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (b"plain\n", b"plain\n"),
        (b"a\rb\n", b"b\n"),
        (b"a\r\n", b"a\n"),
        (b"\ra\rb\r\r\n", b"b\n"),
        (b"a\rb", b"b"),
        (b"\r\n", b"\n"),
    ],
)
def test_final_state(line: bytes, shown: bytes) -> None:
    assert final_state(line) == shown


def test_full_disk_ends_the_log_not_the_job(reader: Reader) -> None:
    log = RankLog("/dev/full")
    feed = Feed(reader.sink, rank=1, tag=b"", live=False, log=log)
    feed.take(b"x\n", 0.0)
    feed.take(b"y\n", 0.0)
    log.close()
    assert log.problem == "No space left on device"
    assert reader.text() == b"x\ny\n"
