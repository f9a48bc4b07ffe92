// Runs CUDA kernels on a CPU, so that their arithmetic and indices can be tested without a GPU: every thread of a block is
// a coroutine, blocks run one after another. Included before a .cu file that g++ compiles as C++.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <ucontext.h>
#include <vector>

#define __device__
#define __global__
#define __shared__ static  // blocks run one after another
#define __launch_bounds__(threads)
typedef void* cudaStream_t;
inline int cudaGetLastError() { return 0; }
using std::sqrt;

struct Index { unsigned x; };
static Index threadIdx, blockIdx;

namespace emulated {

constexpr int STACK = 1 << 16, LANES = 32;

struct Thread {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[STACK]};
    bool done = false;
};

// Threads that wait for each other: as many as are alive when the last one arrives.
struct Barrier {
    int arrived = 0, generation = 0, members = 0;
};

static std::vector<Thread>* threads;
static ucontext_t scheduler;
static std::function<void()> body;
static Barrier whole, warps[64];
static uint64_t slots[64][LANES];

inline void yield() {
    unsigned self = threadIdx.x;
    swapcontext(&(*threads)[self].context, &scheduler);
    threadIdx.x = self;
}

inline void wait(Barrier& barrier) {
    int generation = barrier.generation;
    if (++barrier.arrived == barrier.members) {
        barrier.arrived = 0;
        ++barrier.generation;
    }
    while (barrier.generation == generation) yield();
}

inline void leave(Barrier& barrier) {
    if (--barrier.members && barrier.arrived == barrier.members) {
        barrier.arrived = 0;
        ++barrier.generation;
    }
}

static void start() {
    body();
    leave(whole);
    leave(warps[threadIdx.x / LANES]);
    (*threads)[threadIdx.x].done = true;
    swapcontext(&(*threads)[threadIdx.x].context, &scheduler);
}

static void run(long long blocks, int count, std::function<void()> kernel) {
    body = std::move(kernel);
    std::vector<Thread> all(count);
    threads = &all;
    for (long long block = 0; block < blocks; ++block) {
        blockIdx.x = unsigned(block);
        whole = {0, 0, count};
        for (int warp = 0; warp * LANES < count; ++warp) warps[warp] = {0, 0, LANES};
        for (Thread& thread : all) {
            thread.done = false;
            getcontext(&thread.context);
            thread.context.uc_stack.ss_sp = thread.stack.get();
            thread.context.uc_stack.ss_size = STACK;
            thread.context.uc_link = nullptr;
            makecontext(&thread.context, start, 0);
        }
        for (int left = count, idle = 0; left;) {
            left = 0;
            for (int t = 0; t < count; ++t) {
                if (all[t].done) continue;
                threadIdx.x = unsigned(t);
                swapcontext(&scheduler, &all[t].context);
                left += !all[t].done;
            }
            if (++idle > 1000000) std::fprintf(stderr, "threads wait for ever\n"), std::abort();
        }
    }
}

// What every lane of the warp gave, read by all before any gives the next.
template <typename Value, typename Read>
inline auto exchange(Value value, Read read) {
    int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    std::memcpy(&slots[warp][lane], &value, sizeof(value));
    wait(warps[warp]);
    auto result = read(slots[warp], lane);
    wait(warps[warp]);
    return result;
}

}  // namespace emulated

inline void __syncthreads() { emulated::wait(emulated::whole); }

inline unsigned __ballot_sync(unsigned, bool vote) {
    return emulated::exchange(uint64_t(vote), [](const uint64_t* votes, int) {
        unsigned word = 0;
        for (int lane = 0; lane < emulated::LANES; ++lane) word |= unsigned(votes[lane]) << lane;
        return word;
    });
}

template <typename Value>
inline Value __shfl_xor_sync(unsigned, Value value, int step) {
    return emulated::exchange(value, [step](const uint64_t* values, int lane) {
        Value other;
        std::memcpy(&other, &values[lane ^ step], sizeof(other));
        return other;
    });
}

inline float __uint_as_float(unsigned bits) { float f; std::memcpy(&f, &bits, 4); return f; }
inline unsigned __float_as_uint(float f) { unsigned bits; std::memcpy(&bits, &f, 4); return bits; }
inline int __float2int_rn(float f) { return int(std::nearbyint(f)); }

#define LAUNCH(kernel, blocks, stream, ...) \
    emulated::run(blocks, THREADS, [=] { kernel(__VA_ARGS__); })
