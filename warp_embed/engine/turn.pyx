"""Taking turns: one caller of a session, one pass of a model."""
import threading

cimport cython
from cpython.pythread cimport PyThread_get_thread_ident

from warp_embed.errors import SessionBusy, SessionClosed

cdef double LOOK_PERIOD_S = 0.02        # a waiting call looks so often whether it was cancelled


@cython.final
cdef class Turn:
    """A lock for a `with` statement that knows its owner and never waits for itself.

    It is written in Cython because a signal handler may raise between any two lines of Python: KeyboardInterrupt
    between taking a lock and the `try` that gives it back would keep it for ever. Here are no such places.

    Parameters
    ----------
    check : callable
        Called first, before any lock; what it raises comes out.
    patience_s : float
        How long to wait for another thread before SessionBusy; below 0: for ever.

    Attributes
    ----------
    lock : threading.Lock
    owner : int
        Identifier of the thread that is inside, or 0.
    closed : bool
        Set it, and nobody gets in any more: SessionClosed.
    """
    cdef readonly object lock
    cdef readonly unsigned long owner
    cdef public double patience_s
    cdef public bint closed
    cdef object check

    def __init__(self, check, double patience_s):
        self.lock = threading.Lock()
        self.check = check
        self.patience_s = patience_s

    cdef int take(self, object stop) except -1:
        """stop, a callable or None: called again and again while waiting; it ends that by raising."""
        cdef unsigned long me = <unsigned long>PyThread_get_thread_ident()
        self.check()
        if self.owner == me:
            raise SessionBusy("this thread is inside such a call already: a callback or a signal handler called again")
        if stop is None:
            if self.closed or not self.lock.acquire(True, -1 if self.patience_s < 0 else self.patience_s):
                if self.closed:
                    raise SessionClosed("this session was closed")
                raise SessionBusy("another thread is using this session; give each thread its own, or wait for it")
        else:
            while not self.lock.acquire(True, LOOK_PERIOD_S):
                stop()
        self.owner = me
        return 0

    def __enter__(self):
        self.take(None)

    def __exit__(self, *exc):
        self.owner = 0
        self.lock.release()


@cython.final
cdef class TurnUnless:
    """A turn that is waited for until `stop` raises; None: for ever, without a check, for whoever wants to close."""
    cdef Turn turn
    cdef object stop

    def __init__(self, Turn turn not None, stop):
        self.turn = turn
        self.stop = stop

    def __enter__(self):
        if self.stop is not None:
            self.turn.take(self.stop)
        else:
            self.turn.lock.acquire()
            self.turn.owner = <unsigned long>PyThread_get_thread_ident()

    def __exit__(self, *exc):
        self.turn.owner = 0
        self.turn.lock.release()
