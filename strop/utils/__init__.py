"""Small named modules that every package uses.

activity.py            Activity of this process
allocator.py           torch's allocator of CUDA memory, in segments that grow
atomic_io.py           Writes that survive a crash
background.py          Work in a thread beside the process's own
background_loop.py     Event loops in threads of their own, for what outlives the loop of any one caller or may block
                       it
c_library.py           Functions in C, compiled once for a machine
call_limits.py         Settings of calls to a service over HTTP, and its address
call_loop.py           The event loop of a worker whose work outlives the call that began it
deadline.py            Time that has limits of its own, as that of a program in a sandbox, is not counted by the
                       deadline of a sample
device.py              The device this machine computes on
embedding_rows.py      Rows of a model's embedding, and tokens for which it has none
field_types.py         Types of configuration fields
gc_freeze.py           Python's garbage collection during a run
glibc.py               The heap of glibc's allocator
host_copy.py           Tensors of a device on their way to host memory
http_client.py         Calls of a service that takes and gives JSON over HTTP
http_post.py           One POST of JSON with one deadline for all of it
json_lines.py          One JSON array a line, for pipes and files
json_messages.py       JSON objects over a connection, each behind four bytes that say how long it is; nothing is
                       unpickled
lazy_import.py         Names of a package that are imported when they are first used, so that its light modules can be
                       had alone
machine_choice.py      Choices that a measurement makes once for a machine
machine_limits.py      Cores and memory that this process may still use, within its control groups
metrics.py             Metrics
network_interfaces.py  Network interfaces by address, and the libraries that listen on one
ports.py               Free ports, for programs that are told which one to listen on
process_profiler.py    Profilers of this process during one step
quiet_libraries.py     Quiet libraries, and the log of warnings on the terminal
registry.py            Registries
remote_path.py         Names of what does not lie on this machine
rng.py                 Random numbers as pure functions of a key and a position
safe_read.py           Files that somebody else may have written
setting_text.py        Values of settings as a file or a command line has them, for sentences
shell_words.py         Words of command lines that a person can copy
standard_error.py      Standard error that cannot end a run
tensor_metrics.py      Metrics of a loss
terminal.py            Terminal output
timeline.py            Timeline of this process
token_bucket.py        Calls per second, as a bucket of tokens
triton.py              Triton, where this build of torch brings it
trust.py               Trust in settings
user_files.py          Python files of the user's own, imported once per process; what they define registers itself
verdict.py             Findings of a check, and how much they matter
chat_template/         Chat templates
hub/                   Hubs and stores
sanitize/              The border

Nothing is imported here: the settings are read without torch.
"""
