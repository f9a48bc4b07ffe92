// Routing on the CPU; see __init__.py for what is computed. Compiled once per instruction set (ISA names it).
#include "../common/halves.h"
#include "../common/rows.h"

namespace {

// Numbers of the order of scores: NaN is the largest, and the two zeros are equal.
inline int32_t rank_of(float score) {
    if (score != score) return INT32_MAX;
    int32_t bits = bitcast<int32_t>(score + 0.0f);
    return bits < 0 ? bits ^ INT32_MAX : bits;
}

// The k best of a row, by insertion: most scores are compared once.
template <typename Type>
void best(const typename Type::Element* row, int64_t count, int64_t k, int64_t* experts) {
    auto rank = [&](int64_t expert) { return rank_of(Type::get(row + expert)); };
    int32_t least = INT32_MIN;  // of the k best; no score has this rank
    for (int64_t expert = 0, found = 0; expert < count; ++expert) {
        int32_t mine = rank(expert);
        if (found == k && mine <= least) continue;
        int64_t at = found < k ? found++ : k - 1;
        for (; at > 0 && rank(experts[at - 1]) < mine; --at) experts[at] = experts[at - 1];
        experts[at] = expert;
        if (found == k) least = rank(experts[k - 1]);
    }
}

// Counting sort of assignments, cut into ranges: each is counted after choose(range) has made it, then each is placed.
// first: room for the counts of RANGES ranges, which become the next position of each expert within a range.
template <typename Choose>
void sort(const int64_t* experts, const int64_t* cuts, int64_t ranges, int64_t count, int64_t* counts,
          int64_t* positions, int64_t* first, const Choose& choose) {
    auto known = [=](int64_t a) { return uint64_t(experts[a]) < uint64_t(count); };
    auto each = [&](const auto& body) {
        parallel(ranges, int(ranges), [&](int64_t from, int64_t to) {
            for (int64_t range = from; range < to; ++range) body(range, first + range * count);
        });
    };
    each([&](int64_t range, int64_t* mine) {
        choose(range);
        memset(mine, 0, size_t(count) * sizeof(*mine));
        for (int64_t a = cuts[range]; a < cuts[range + 1]; ++a)
            if (known(a)) ++mine[experts[a]];
    });
    int64_t next = 0;
    for (int64_t expert = 0; expert < count; ++expert) {
        counts[expert] = -next;
        for (int64_t range = 0; range < ranges; ++range) {
            int64_t here = first[range * count + expert];
            first[range * count + expert] = next;
            next += here;
        }
        counts[expert] += next;
    }
    each([&](int64_t range, int64_t* mine) {
        for (int64_t a = cuts[range]; a < cuts[range + 1]; ++a) positions[a] = known(a) ? mine[experts[a]]++ : -1;
    });
}

// The cuts of `groups` groups of k assignments each, one range for each thread that pays.
inline int64_t cut(int64_t groups, int64_t k, int64_t work, int threads, int64_t* cuts) {
    int64_t ranges = larger(1, smaller(smaller(RANGES, groups), enough(threads, work)));
    for (int64_t range = 0; range <= ranges; ++range) cuts[range] = groups * range / ranges * k;
    return ranges;
}

}  // namespace

// scores: [tokens][count], dtype: 0 float, 1 bfloat16, 2 half. first: [RANGES][count].
EXPORT(routing_top_k)(const void* scores, int dtype, int64_t tokens, int64_t count, int64_t k, int64_t* experts,
                      int64_t* counts, int64_t* positions, int64_t* first, int threads) {
    int64_t cuts[RANGES + 1], ranges = cut(tokens, k, tokens * count, threads, cuts);
    with_type(dtype, [&](auto type) {
        typedef decltype(type) Type;
        sort(experts, cuts, ranges, count, counts, positions, first, [&](int64_t range) {
            for (int64_t token = cuts[range] / k; token < cuts[range + 1] / k; ++token)
                best<Type>(static_cast<const typename Type::Element*>(scores) + token * count, count, k, experts + token * k);
        });
    });
}

EXPORT(routing_by_expert)(const int64_t* experts, int64_t assignments, int64_t count, int64_t* counts,
                          int64_t* positions, int64_t* first, int threads) {
    int64_t cuts[RANGES + 1], ranges = cut(assignments, 1, assignments, threads, cuts);
    sort(experts, cuts, ranges, count, counts, positions, first, [](int64_t) {});
}
