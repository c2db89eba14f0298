"""A clock on which hours pass at once: whenever all threads that it started wait, time jumps to what one waits for.

See `trainer.waits.Clock`. A test's own thread is one of them, and waits with `sleep`.
"""

import threading

STUCK_S = 60.0
"""Real seconds after which a test that waits for a thread fails."""


class FakeClock:
    def __init__(self, now=1_000_000.0):
        self.now = now
        self._changed = threading.Condition()
        self._running = 1  # the test's own thread
        self._waiting = []  # (until when, whether what is waited for has happened)

    def time(self):
        return self.now

    monotonic = time

    def event(self):
        return FakeEvent(self)

    def lock(self):
        return FakeLock(self)

    def start(self, target, name):
        return FakeThread(self, target, name)

    def sleep(self, seconds):
        self.wait(lambda: False, seconds)

    def wait(self, ready, seconds):
        """Whether it was ready before so many seconds had passed."""
        with self._changed:
            waiting = (self.now + seconds, ready)
            self._waiting.append(waiting)
            self._running -= 1
            while not self._may_go(waiting):
                if self._running or any(self._may_go(other) for other in self._waiting):
                    assert self._changed.wait(STUCK_S), "a thread neither goes on nor waits on this clock"
                else:
                    self._jump()
                    self._changed.notify_all()
            self._waiting.remove(waiting)
            self._running += 1
            return ready()

    def changed(self, begun=0):
        """What somebody waits for may have happened; so many more threads run."""
        with self._changed:
            self._running += begun
            self._changed.notify_all()

    def _may_go(self, waiting):
        return self.now >= waiting[0] or waiting[1]()

    def _jump(self):
        self.now = min(end for end, _ in self._waiting)


class FakeEvent:
    def __init__(self, clock):
        self._clock, self._set = clock, False

    def set(self):
        self._set = True
        self._clock.changed()

    def is_set(self):
        return self._set

    def wait(self, timeout):
        return self._clock.wait(self.is_set, timeout)


class FakeLock:
    def __init__(self, clock):
        self._clock, self._own = clock, threading.Lock()

    def acquire(self, *, timeout):
        return self._own.acquire(blocking=False) or (
            self._clock.wait(lambda: not self._own.locked(), timeout) and self._own.acquire(blocking=False)
        )

    def release(self):
        self._own.release()
        self._clock.changed()

    def __enter__(self):
        assert self.acquire(timeout=3600.0)

    def __exit__(self, *error):
        self.release()


class FakeThread:
    def __init__(self, clock, target, name):
        self._over = FakeEvent(clock)
        clock.changed(begun=1)

        def run():
            try:
                target()
            finally:
                self._over.set()
                clock.changed(begun=-1)

        threading.Thread(target=run, name=name, daemon=True).start()

    def join(self, timeout):
        self._over.wait(timeout)

    def is_alive(self):
        return not self._over.is_set()
