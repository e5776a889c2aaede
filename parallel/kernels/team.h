// A team of threads for each thread that computes: shares of the work are dealt, and taken from a thread that is late.
//
// The thread that called never waits for one that has nothing of its work: one that lost its core, or still sleeps, is
// done without, and its share is computed by the others, in chunks. Only a chunk that was begun is waited for. Whoever
// waits spins briefly and then gives its core away, in naps: a system moves a thread that waits for a core to one that
// falls idle, but not within the first half millisecond.
#pragma once

#include <cstdint>

using Run = void (*)(void *argument, int64_t first, int64_t last);

// Calls `run` for chunks of at most `size` that together are 0 .. count, on up to `num_threads` threads with the caller.
// Equal shares of `count` are made of at most 65,535 chunks each.
void run_in_team(Run run, void *argument, int64_t count, int64_t size, int num_threads);
