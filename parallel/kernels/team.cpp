// The threads behind `run_in_team`: chunks are taken by compare-and-swap, waits end by futex.

#include "team.h"

#if defined(__linux__)

#include <linux/futex.h>
#include <sched.h>
#include <strings.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdlib>
#include <ctime>
#include <memory>
#include <system_error>
#include <thread>

namespace {

constexpr int MOST_THREADS = 256;
constexpr int DEFAULT_SPINS = 5000, CROWDED_SPINS = 100, SPINS_FOR_CHUNK = 2000;
constexpr long NAP_NS = 300000;
constexpr int NAPS = 4;  // after work, before a thread sleeps until there is more

using Word = std::atomic<uint32_t>;

inline void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    asm volatile("yield");
#endif
}

// Until `word` is not `value` any more, or the nap is over; without `nap_ns` however long it takes.
void sleep_while(Word &word, uint32_t value, long nap_ns) {
    const timespec nap = {0, nap_ns};
    syscall(SYS_futex, reinterpret_cast<uint32_t *>(&word), FUTEX_WAIT_PRIVATE, value, nap_ns ? &nap : nullptr, nullptr, 0);
}

void wake_all(Word &word) {
    syscall(SYS_futex, reinterpret_cast<uint32_t *>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

std::atomic<int> num_threads_of_process{0};  // of all teams

int count_cores() {
    cpu_set_t cores;
    return sched_getaffinity(0, sizeof(cores), &cores) ? 1 : CPU_COUNT(&cores);
}

// How long an idle thread spins: what OpenMP's runtime is told (actors/worker/openmp.py), hardly where threads of several
// teams share the cores.
int idle_spins() {
    static const char *policy = std::getenv("OMP_WAIT_POLICY"), *spins = std::getenv("GOMP_SPINCOUNT");
    static const int chosen = policy && !strcasecmp(policy, "passive") ? 0 : spins ? std::atoi(spins) : DEFAULT_SPINS;
    static const int num_cores = count_cores();
    const bool is_crowded = num_threads_of_process.load(std::memory_order_relaxed) > num_cores;
    return is_crowded && chosen > CROWDED_SPINS ? CROWDED_SPINS : chosen;
}

// The chunks of one thread in one word, so that one of a round that is over cannot be taken: round, next, end.
struct alignas(64) Share {
    std::atomic<uint64_t> state{0};

    void deal(uint32_t round, int64_t count) { state.store(static_cast<uint64_t>(round) << 32 | count, std::memory_order_release); }

    // The next chunk, counted from the share's first one; -1 if none is left.
    int64_t take() {
        uint64_t now = state.load(std::memory_order_relaxed);
        while ((now >> 16 & 0xffff) < (now & 0xffff))
            if (state.compare_exchange_weak(now, now + 0x10000, std::memory_order_acquire, std::memory_order_relaxed))
                return now >> 16 & 0xffff;
        return -1;
    }
};

// What the threads of a team share; the last one of them frees it. The fields of a round change only while no chunk is
// left to take and none is computed.
struct Round {
    Share shares[MOST_THREADS];
    Run run = nullptr;
    void *argument = nullptr;
    int64_t count = 0, size = 1;
    uint32_t num_chunks = 0;
    std::atomic<int> num_threads{0};
    std::atomic<bool> is_over{false};
    alignas(64) Word number{0};  // of rounds
    std::atomic<int> num_asleep{0};
    alignas(64) Word num_done{0};
    std::atomic<bool> is_awaited{false};

    // The first of a thread's share.
    int64_t start(int self) const { return count * self / num_threads.load(std::memory_order_relaxed); }

    int64_t chunks_of(int self) const { return (start(self + 1) - start(self) + size - 1) / size; }

    // Compute chunks of every share, from that of this thread on, until none is left.
    void work(int self) {
        const int shared_by = num_threads.load(std::memory_order_relaxed);
        for (int i = 0; i < shared_by; i++) {
            const int owner = (self + i) % shared_by;
            for (int64_t chunk; (chunk = shares[owner].take()) >= 0;) {
                const uint32_t all = num_chunks;
                const int64_t first = start(owner) + chunk * size, last = start(owner + 1);
                run(argument, first, first + size < last ? first + size : last);
                if (num_done.fetch_add(1) + 1 == all && is_awaited.load()) wake_all(num_done);
            }
        }
    }

    void deal() {
        const int shared_by = num_threads.load(std::memory_order_relaxed);
        const uint32_t round = number.load(std::memory_order_relaxed) + 1;
        num_done.store(0, std::memory_order_relaxed);
        num_chunks = 0;
        for (int i = 0; i < shared_by; i++) num_chunks += chunks_of(i);
        for (int i = 0; i < shared_by; i++) shares[i].deal(round, chunks_of(i));
        number.store(round);
        if (num_asleep.load()) wake_all(number);
    }

    void await_chunks() {
        const uint32_t all = num_chunks;
        for (int i = 0; i < SPINS_FOR_CHUNK; i++) {
            if (num_done.load(std::memory_order_acquire) == all) return;
            pause_briefly();
        }
        is_awaited.store(true);
        for (uint32_t done; (done = num_done.load()) != all;) sleep_while(num_done, done, NAP_NS);
        is_awaited.store(false);
    }
};

// Until there is another round than `seen`.
void await_round(Round &round, uint32_t seen) {
    const int spins = idle_spins();
    for (int i = 0; i < spins; i++) {
        if (round.number.load(std::memory_order_acquire) != seen) return;
        pause_briefly();
    }
    round.num_asleep.fetch_add(1);
    for (int naps = spins ? NAPS : 0; round.number.load() == seen; naps--) sleep_while(round.number, seen, naps > 0 ? NAP_NS : 0);
    round.num_asleep.fetch_sub(1);
}

void serve(std::shared_ptr<Round> round, int self) {
    for (uint32_t seen = 0; !round->is_over.load();) {
        seen = round->number.load();
        if (self < round->num_threads.load()) round->work(self);
        if (!round->is_over.load()) await_round(*round, seen);
    }
}

class Team {
   public:
    Team() {
        idle_spins();  // reads the environment, which a thread of the team should not do beside another's writing
        num_threads_of_process.fetch_add(1);
    }

    ~Team() {
        num_threads_of_process.fetch_sub(num_members_);
        round_->is_over.store(true);
        round_->number.fetch_add(1);
        wake_all(round_->number);
    }

    void run(Run run, void *argument, int64_t count, int64_t size, int num_threads) {
        round_->run = run, round_->argument = argument, round_->count = count, round_->size = size;
        round_->num_threads.store(grow(num_threads));
        round_->deal();
        round_->work(0);
        round_->await_chunks();
    }

   private:
    // Start what is missing to so many threads; how many there are, fewer where the system gives none.
    int grow(int num_threads) {
        try {
            for (; num_members_ < num_threads; num_members_++) {
                std::thread(serve, round_, num_members_).detach();
                num_threads_of_process.fetch_add(1);
            }
        } catch (const std::system_error &) {
        }
        return num_members_ < num_threads ? num_members_ : num_threads;
    }

    std::shared_ptr<Round> round_ = std::make_shared<Round>();
    int num_members_ = 1;  // with the thread whose team it is
};

}  // namespace

void run_in_team(Run run, void *argument, int64_t count, int64_t size, int num_threads) {
    static thread_local Team team;
    team.run(run, argument, count, size, num_threads < MOST_THREADS ? num_threads : MOST_THREADS);
}

#else

#include <atomic>

extern "C" void GOMP_parallel(void (*body)(void *), void *argument, unsigned num_threads, unsigned flags);

// Elsewhere with the threads of OpenMP's runtime, all of which are waited for.
void run_in_team(Run run, void *argument, int64_t count, int64_t size, int num_threads) {
    struct Round {
        Run run;
        void *argument;
        int64_t count, size;
        std::atomic<int64_t> next;
    } round = {run, argument, count, size, {0}};
    auto work = [](void *given) {
        auto *one = static_cast<Round *>(given);
        for (int64_t first; (first = one->next.fetch_add(one->size)) < one->count;)
            one->run(one->argument, first, first + one->size < one->count ? first + one->size : one->count);
    };
    GOMP_parallel(work, &round, num_threads, 0);
}

#endif
