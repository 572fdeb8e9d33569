"""A shell starts its background jobs with Ctrl-C ignored, and so would every program that a test starts. Not here."""
import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
