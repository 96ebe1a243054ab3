// What the simulated runtime says of its memory, and is told.
#pragma once

#include <cstddef>
#include <cstdint>

// What is read of what nobody computed, see `torchmem_note_decision`.
enum : int { kShape, kCount, kNumber };

extern "C" {

// Whether every byte was copied, set, or computed from such.
int torchmem_is_known(const void* start, size_t bytes);
// Whether any byte would have been written by a kernel that computed nothing, or rests on such.
int torchmem_is_missing(const void* start, size_t bytes);
// Whether nobody has written to these bytes: they read zero.
int torchmem_is_zero(const void* start, size_t bytes);
// Bytes were computed, and stand there.
void torchmem_note_values(void* start, size_t bytes, int exact, int rests_on_missing);
// What nobody computed is read. A shape rests on it (0); it is a count or the truth, which decide unless
// they are only shown (1); or a number or a copy, which may be used for that (2).
void torchmem_note_decision(int kind);
// A kernel would have written bytes that are not known; they read zero from now on.
void torchmem_forget_values(void* start, size_t bytes);
// Notes something for bytes that can be computed later: `what` has them from its `first_byte` on. It is
// dropped with the memory, and where something else is written there; a copy of the bytes has it, too.
void torchmem_defer(void* start, size_t bytes, size_t first_byte, void* what, void (*drop)(void*));
// Calls with each note that has some of these bytes, and with all bytes that it has.
void torchmem_each_deferred(const void* start, size_t bytes,
                            void (*call)(void* what, void* start, size_t bytes, size_t first_byte,
                                         void* context),
                            void* context);
// How often this thread copied or set device memory.
long torchmem_writes();
// How many kernels of other libraries than torch's this thread has launched.
long torchmem_launches_of_others();
// Has `call()` called whenever a thread is about to change device memory, on that thread.
void torchmem_before_writes(void (*call)());
// Until `torchmem_end_answers`, this thread's reads of a number from the device give this one.
void torchmem_answer_reads(long number, int exact);
void torchmem_end_answers();
// How many elements the sparse matrix has that this thread makes; -1 where nobody knows.
void torchmem_note_sparse_elements(long count);
// While it is on, what this thread reads from the device is not counted.
void torchmem_overlook_reads(int on);
// How many graphs are being captured, and whether a stream's work is captured into one of them.
int torchmem_captures();
int torchmem_is_capturing(void* stream);
// Has `run(what)` called at each launch of the graph, behind what was captured before; `drop(what)`
// when the graph is gone.
void torchmem_capture(void* stream, void (*run)(void*), void (*drop)(void*), void* what);
// Where this thread's first draw for a graph begins since it took another one: behind the offset that
// stands in device memory at each launch, as the seed does. 0 where it made none.
int torchmem_captured_draw(const uint64_t** seed, const uint64_t** offset, uint64_t* further);
// Takes the four words of a draw in place of the one that was made; all 0 for none.
void torchmem_exchange_draw(uint64_t* words);
// How many threads the GPU runs at once.
long torchmem_threads();
// While this thread computes for the GPU, no memory of the host is reported to torch's profiler.
void torchmem_compute(int on);

}
