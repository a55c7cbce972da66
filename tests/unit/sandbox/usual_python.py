"""What honest programs do with Python: each of ``USUAL`` must work behind every set of walls with a filter.

``works()`` of each raises where something does not.
"""

from __future__ import annotations

from textwrap import dedent, indent

_BODIES = {
    "files": """
        import os, pathlib, shutil, tempfile
        with tempfile.TemporaryDirectory() as folder:
            one = pathlib.Path(folder) / "one"
            one.write_text("x" * 100_000)
            shutil.copyfile(one, one.with_name("two"))
            one.with_name("two").rename(one.with_name("three"))
            os.link(one, one.with_name("link"))
            os.symlink(one, one.with_name("symlink"))
            assert sorted(os.listdir(folder)) == ["link", "one", "symlink", "three"]
            assert os.readlink(folder + "/symlink") == str(one) and len(list(os.scandir(folder))) == 4
            with open(one, "r+b") as file:
                file.truncate(10)
                os.fsync(file.fileno())
            assert one.stat().st_size == 10 and os.access(one, os.R_OK) and os.statvfs(folder)
            os.makedirs(folder + "/a/b/c")
            shutil.rmtree(folder + "/a")
            here = os.open(folder + "/one", os.O_RDWR)
            os.pwrite(here, b"abc", 0)
            assert os.pread(here, 3, 0) == b"abc" and os.writev(here, [b"a", b"b"]) == 2
            os.posix_fallocate(here, 0, 100)
            os.set_inheritable(os.dup2(here, 30), True)
            os.set_blocking(here, False)
            assert not os.isatty(here) and not os.get_blocking(here)
            os.mkfifo(folder + "/fifo")
        for made in (tempfile.NamedTemporaryFile(), tempfile.TemporaryFile(), tempfile.SpooledTemporaryFile(1)):
            made.write(b"xx")
            made.close()
    """,
    "threads": """
        import concurrent.futures, queue, sys, threading
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(abs, range(100))) == 4950
        ready, both = threading.Event(), threading.Barrier(2)
        threading.Timer(0.01, ready.set).start()
        assert ready.wait(60)
        other = threading.Thread(target=both.wait)
        other.start()
        both.wait()
        other.join()
        try:
            queue.Queue().get(timeout=0.01)
        except queue.Empty:
            pass
        def deep(n):
            return 0 if n == 0 else 1 + deep(n - 1)
        found = []
        threading.stack_size(256 << 20)
        sys.setrecursionlimit(10 ** 6)
        thread = threading.Thread(target=lambda: found.append(deep(50_000)))
        thread.start()
        thread.join()
        threading.stack_size(0)
        assert found == [50_000]
    """,
    "asyncio and pairs of sockets": """
        import asyncio, select, selectors, signal, socket, time
        async def main():
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, print)
            await asyncio.wait_for(asyncio.gather(*[asyncio.sleep(0.001) for _ in range(10)]), 60)
            await asyncio.to_thread(time.sleep, 0.001)
            ours, theirs = socket.socketpair()
            _, writer = await asyncio.open_connection(sock=ours)
            writer.write(b"x")
            assert theirs.recv(1) == b"x"
        asyncio.run(main())
        one, other = socket.socketpair()
        one.settimeout(60)
        one.sendmsg([b"ab"])
        assert other.recvmsg(2)[0] == b"ab" and socket.socket(fileno=other.detach()).type == socket.SOCK_STREAM
        one.shutdown(socket.SHUT_WR)
        for watch in (selectors.DefaultSelector(), selectors.PollSelector(), selectors.SelectSelector()):
            watch.register(one, selectors.EVENT_READ)
            watch.select(0)
    """,
    "signals and limits": """
        import faulthandler, os, resource, signal, threading
        seen = []
        signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
        signal.signal(signal.SIGTERM, lambda *_: seen.append(1))
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        assert signal.sigwait([signal.SIGALRM]) == signal.SIGALRM
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
        os.kill(os.getpid(), signal.SIGTERM)
        signal.raise_signal(signal.SIGALRM)
        signal.pthread_kill(threading.get_ident(), signal.SIGALRM)
        os.kill(0, 0)
        assert len(seen) == 3
        signal.alarm(9)
        assert signal.alarm(0) == 9
        resource.setrlimit(resource.RLIMIT_STACK, resource.getrlimit(resource.RLIMIT_STACK))
        assert resource.getrusage(resource.RUSAGE_SELF).ru_utime >= 0 and os.sched_getaffinity(0)
        with open(os.devnull, "w") as nowhere:
            faulthandler.enable(nowhere)
            faulthandler.dump_traceback_later(60, file=nowhere)
            faulthandler.cancel_dump_traceback_later()
        os.getuid(), os.getgroups(), os.getpgrp(), os.getsid(0), os.times(), os.uname(), os.cpu_count(), os.umask(18)
    """,
    "time, zones, languages": """
        import calendar, datetime, locale, time, zoneinfo
        time.sleep(0.001)
        assert time.perf_counter() > 0 and time.process_time() >= 0 and time.thread_time() >= 0
        time.tzset()
        day = datetime.datetime(2024, 2, 29, 12, tzinfo=datetime.timezone.utc)
        assert day.astimezone().utctimetuple()[:4] == (2024, 2, 29, 12) and day.strftime("%A") == "Thursday"
        try:
            assert day.astimezone(zoneinfo.ZoneInfo("Europe/Berlin")).hour == 13
        except zoneinfo.ZoneInfoNotFoundError:
            pass
        locale.setlocale(locale.LC_ALL, "C")
        assert locale.format_string("%d", 1000) == "1000" and "29" in calendar.TextCalendar().formatmonth(2024, 2)
    """,
    "numbers, texts, chance": """
        import decimal, fractions, hashlib, json, math, os, pickle, random, re, secrets, statistics, sys, uuid
        decimal.getcontext().prec = 100
        assert str(decimal.Decimal(2).sqrt()).startswith("1.4142135623") and math.factorial(1000) % 997 == 0
        random.seed(0)
        assert random.SystemRandom().random() < 1 and len(secrets.token_hex(4)) == 8 and len(os.urandom(8)) == 8
        assert re.findall(r"(a+)b", "aab ab") == ["aa", "a"] and json.loads(json.dumps({"a": [1.5]})) == {"a": [1.5]}
        assert uuid.uuid4() != uuid.uuid4() and pickle.loads(pickle.dumps([1])) == [1]
        assert hashlib.sha256(b"x").hexdigest().startswith("2d711642") and statistics.mean([1, 2]) == 1.5
        assert fractions.Fraction(1, 3) * 3 == 1
        big = bytearray(100 << 20)
        del big
    """,
    "databases, archives, maps, libraries": """
        import bz2, ctypes, fcntl, gzip, lzma, mmap, os, sqlite3, tarfile, tempfile, zipfile
        folder = tempfile.mkdtemp()
        for mode in ("delete", "wal"):
            base = sqlite3.connect(f"{folder}/{mode}.db")
            base.execute(f"pragma journal_mode={mode}")
            base.execute("create table t(a)")
            base.execute("insert into t values(1)")
            base.commit()
            assert base.execute("select a from t").fetchall() == [(1,)]
            base.close()
        with zipfile.ZipFile(folder + "/z.zip", "w") as file:
            file.writestr("a", "b")
        zipfile.ZipFile(folder + "/z.zip").extractall(folder)
        with tarfile.open(folder + "/t.tar", "w") as file:
            file.add(folder + "/a", "a")
        assert open(folder + "/a").read() == "b" and lzma.decompress(lzma.compress(b"x")) == b"x"
        assert bz2.decompress(bz2.compress(b"x")) == gzip.decompress(gzip.compress(b"x")) == b"x"
        with tempfile.TemporaryFile() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            fcntl.lockf(file, fcntl.LOCK_EX)
            assert fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 40) >= 40
            file.truncate(4096)
            with mmap.mmap(file.fileno(), 4096) as seen:
                seen[0] = 1
                seen.flush()
        with mmap.mmap(-1, 1 << 20) as seen:
            seen.resize(1 << 21)
            seen.madvise(mmap.MADV_DONTNEED)
        assert ctypes.CDLL(None).getpid() == os.getpid()
        assert ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 3)() == 3
    """,
    "what is refused is an error to catch": """
        import errno, os, socket, subprocess
        for refused in (os.fork, socket.socket, lambda: subprocess.run(["/bin/true"]), lambda: os.popen("true")):
            try:
                refused()
            except PermissionError:
                continue
            raise AssertionError(refused)
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            pass
        assert os.system("true") == 127 << 8
        try:
            os.close(os.pidfd_open(os.getpid()))
        except OSError as error:
            assert error.errno == errno.ENOSYS
    """,
}
USUAL = {name: f"def works():\n{indent(dedent(body).strip(), '    ')}" for name, body in _BODIES.items()}
