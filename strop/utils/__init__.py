"""What every room needs and none owns.

activity.py            What this process does (`doing`), and which things it waits for (`item`)
atomic_io.py           Writes that survive a crash
background.py          What happens in a thread beside what the process does
background_loop.py     Event loops in threads of their own, for what outlives the loop of any one caller or may block
                       it
call_loop.py           The event loop of a worker whose work outlives the call that began it
deadline.py            Time that has limits of its own, as that of a program in a sandbox, is not counted by the
                       deadline of a sample
device.py              Which device this machine computes on
field_types.py         What a field of a configuration may hold
gc_freeze.py           How Python looks for garbage while a run goes on
http_client.py         Calls of a service that takes and gives JSON over HTTP
http_post.py           One POST of JSON with one deadline for all of it
json_messages.py       JSON objects over a connection, each behind four bytes that say how long it is
lazy_import.py         Names of a package that are imported when they are first used, so that its light modules can be
                       had alone
machine_limits.py      What this process may still take of its machine
metrics.py             Metrics
network_interfaces.py  Network interfaces by address, and the libraries that listen on one
quiet_libraries.py     Quiet libraries, and the log of warnings on the terminal
registry.py            Names that arrive from a configuration, and what they stand for
remote_path.py         What does not lie on this machine
rng.py                 Random numbers as pure functions of a key and a position
safe_read.py           Files that somebody else may have written
shell_words.py         Words of command lines that a person can copy
standard_error.py      Standard error that cannot end a run
tensor_metrics.py      What is measured while a loss runs
terminal.py            What reaches the terminal
token_bucket.py        Calls per second, as a bucket of tokens
triton.py              Triton, where this build of torch brings it
trust.py               Whether what settings name may be run
user_files.py          Python files of the user's own, imported once per process
verdict.py             What a check found, and how much it matters
chat_template/         Chat templates
sanitize/              The border

Nothing is imported here: the settings are read without torch.
"""
