// Vectors of W floats by GCC's and clang's vector extensions, for kernels that are compiled once per instruction set.
// Everything has internal linkage: the linker must never use an AVX-512 unit's function in the portable unit.
#pragma once

#include <pthread.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define NAME_(prefix, suffix) prefix##_##suffix
#define NAME(prefix, suffix) NAME_(prefix, suffix)
#define EXPORT(function) extern "C" __attribute__((visibility("default"))) void NAME(function, ISA)

namespace {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * W)));
typedef int32_t Ints __attribute__((vector_size(4 * W)));
typedef uint16_t Shorts __attribute__((vector_size(2 * W)));
typedef int8_t Bytes __attribute__((vector_size(W)));
typedef double Doubles __attribute__((vector_size(4 * W)));      // W / 2 of them
typedef float HalfFloats __attribute__((vector_size(2 * W)));

template <typename To, typename From>
inline To bitcast(From from) {
    static_assert(sizeof(To) == sizeof(From), "");
    To to;
    memcpy(&to, &from, sizeof(to));
    return to;
}

template <typename Vector>
inline Vector load(const void* from) {
    Vector vector;
    memcpy(&vector, from, sizeof(vector));
    return vector;
}

template <typename Vector>
inline void store(void* to, Vector vector) {
    memcpy(to, &vector, sizeof(vector));
}

// By intrinsics, as compilers widen bytes one element at a time.
inline Ints widen(Bytes bytes) {
#if defined(__AVX512F__)
    return bitcast<Ints>(_mm512_cvtepi8_epi32(bitcast<__m128i>(bytes)));
#elif defined(__AVX2__)
    return bitcast<Ints>(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(bitcast<int64_t>(bytes))));
#else
    return Ints{bytes[0], bytes[1], bytes[2], bytes[3]};
#endif
}

// The lower and the upper half of W floats, in fp64.
inline Doubles low(Floats v) {
#if defined(__AVX512F__)
    return _mm512_cvtps_pd(_mm512_castps512_ps256(v));
#elif defined(__AVX2__)
    return _mm256_cvtps_pd(_mm256_castps256_ps128(v));
#else
    return Doubles{v[0], v[1]};
#endif
}

inline Doubles high(Floats v) {
#if defined(__AVX512F__)
    return _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1));
#elif defined(__AVX2__)
    return _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1));
#else
    return Doubles{v[2], v[3]};
#endif
}

// W times one value. (The compiler cannot reduce Floats{} + value to it, as 0 + −0 is not −0.)
inline Floats all(float value) {
#if defined(__AVX512F__)
    return bitcast<Floats>(_mm512_set1_ps(value));
#elif defined(__AVX2__)
    return bitcast<Floats>(_mm256_set1_ps(value));
#else
    return Floats{value, value, value, value};
#endif
}

// a · b + c, rounded once where the processor can.
inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return bitcast<Floats>(_mm512_fmadd_ps(bitcast<__m512>(a), bitcast<__m512>(b), bitcast<__m512>(c)));
#elif defined(__AVX2__)
    return bitcast<Floats>(_mm256_fmadd_ps(bitcast<__m256>(a), bitcast<__m256>(b), bitcast<__m256>(c)));
#else
    return a * b + c;
#endif
}

// float and bfloat16 buffers; bfloat16 is the upper half of a float, rounded to nearest even.
struct Float32 {
    typedef float Element;
    static Floats load(const float* from) { return ::load<Floats>(from); }
    static void store(float* to, Floats values) { ::store(to, values); }
    static float get(const float* from) { return *from; }
    static void put(float* to, float value) { *to = value; }
};

struct BFloat16 {
    typedef uint16_t Element;
    static Floats load(const uint16_t* from) {
        return bitcast<Floats>(__builtin_convertvector(::load<Shorts>(from), Ints) << 16);
    }
    static Shorts pack(Floats values) {
        Ints bits = bitcast<Ints>(values);
        Ints nearest = bits + 0x7fff + ((bits >> 16) & 1);
        Ints kept = values == values ? nearest : (bits | 0x400000);  // a NaN must not round to infinity
        return __builtin_convertvector((kept >> 16) & 0xffff, Shorts);
    }
    static void store(uint16_t* to, Floats values) { ::store(to, pack(values)); }
    static float get(const uint16_t* from) { return bitcast<float>(uint32_t(*from) << 16); }
    static void put(uint16_t* to, float value) {
        uint32_t bits = bitcast<uint32_t>(value);
        *to = uint16_t((value == value ? bits + 0x7fff + ((bits >> 16) & 1) : bits | 0x400000) >> 16);
    }
};

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// The number of threads for so many elements, where starting one takes as long as `grain` elements. A negative `threads`
// asks for that many at any size: tests use it to cut small work too.
inline int worth(int threads, int64_t elements, int64_t grain) {
    return threads < 0 ? -threads : int(smaller(threads, elements / grain));
}

// Runs body(first, last) over the numbers 0 to count - 1, cut into one range per thread. The results must not depend on
// where the cuts are.
template <typename Body>
struct Range {
    const Body* body;
    int64_t first, last;
    static void* run(void* range) {
        Range* r = static_cast<Range*>(range);
        (*r->body)(r->first, r->last);
        return nullptr;
    }
};

template <typename Body>
inline void parallel(int64_t count, int threads, const Body& body) {
    constexpr int MOST = 64;
    threads = int(larger(1, smaller(smaller(threads, MOST), count)));
    Range<Body> ranges[MOST];
    pthread_t ids[MOST];
    bool started[MOST];
    for (int t = threads - 1; t >= 0; --t) {
        ranges[t] = {&body, count * t / threads, count * (t + 1) / threads};
        started[t] = t > 0 && pthread_create(&ids[t], nullptr, Range<Body>::run, &ranges[t]) == 0;
        if (!started[t]) Range<Body>::run(&ranges[t]);
    }
    for (int t = 1; t < threads; ++t)
        if (started[t]) pthread_join(ids[t], nullptr);
}

}  // namespace

#if defined(CHOOSES)
#if defined(HAS_AMX)
#include <sys/syscall.h>
#include <unistd.h>

// Whether this process may use AMX tiles for bf16; Linux grants them on request.
static bool amx() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18;
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("amx-bf16") &&
           syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
}
#endif

// The widest instruction set that both this processor and the library have.
extern "C" __attribute__((visibility("default"))) const char* instruction_set() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq")) {
#if defined(HAS_AMX)
        if (amx()) return "amx";
#endif
        return "avx512";
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "avx2";
#endif
    return "portable";
}
#endif
