// What Python calls: linear attention, causal and over all keys, learned maps, the delta rule, and softmax
// over a window, with heavy hitters too.
// Everything is brought to float32 chunk by chunk; each key head of each row of the batch goes to a thread.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <utility>
#include <vector>

#if defined(__SSE__)
#include <immintrin.h>
#endif
#if defined(__AMX_TILE__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

// Headers of the library come before: what is hidden is called without a table of addresses.
#pragma GCC visibility push(hidden)

#include "bidirectional.h"
#include "channel_backward.h"
#include "channel_forward.h"
#include "delta_backward.h"
#include "delta_forward.h"
#include "delta_step.h"
#include "heavy_forward.h"
#include "heavy_token.h"
#include "linear_backward.h"
#include "linear_forward.h"
#include "softmax_map.h"
#include "window_backward.h"
#include "window_decode.h"
#include "window_forward.h"

#pragma GCC visibility pop

namespace {

template <class Kernel, class Problem>
void run_all(const Problem& p, float number) {
    const int64_t batch_heads = p.batch * p.kv_heads;
#pragma omp parallel for num_threads(p.threads) schedule(dynamic) if (p.threads > 1 && batch_heads > 1)
    for (int64_t batch_head = 0; batch_head < batch_heads; ++batch_head) {
        [[maybe_unused]] const TileSetup<ON_TILES<Kernel>> tiles;
        Kernel(p, number, batch_head).run();
    }
}

// Of kernels that take some heads at a time.
template <class Kernel, class Problem>
void run_together(const Problem& p, float number) {
    const int64_t heads = heads_together(p), groups = (p.kv_heads + heads - 1) / heads;
#pragma omp parallel for num_threads(p.threads) schedule(dynamic) if (p.threads > 1 && p.batch * groups > 1)
    for (int64_t group = 0; group < p.batch * groups; ++group) {
        [[maybe_unused]] const TileSetup<ON_TILES<Kernel>> tiles;
        const int64_t first = group % groups * heads;
        Kernel(p, number, group / groups * p.kv_heads + first, std::min(heads, p.kv_heads - first)).run();
    }
}

[[maybe_unused]] bool all_bfloat16(std::initializer_list<Array> tensors) {
    return std::all_of(tensors.begin(), tensors.end(), [](const Array& x) { return x.dtype == BFLOAT16; });
}

// Values then lose no more than scores.
[[maybe_unused]] bool rounds(const LinearProblem& p) {
    return p.causal && p.length > 1 && all_bfloat16({p.query, p.key});
}

[[maybe_unused]] bool rounds(const DeltaProblem& p) {
    return p.length > 1 && p.key.dtype == BFLOAT16 && (!p.query.data || p.query.dtype == BFLOAT16);
}

}  // namespace

#pragma GCC visibility push(default)

extern "C" {

int64_t linattn_threaded() {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}

int64_t linattn_rounds() {
#if defined(__AVX512BF16__)
    return 1;
#else
    return 0;
#endif
}

// Whether the system lets this process use the processor as the library does; asks it to.
int64_t linattn_permitted() { return tiles_permitted(); }

void linattn_forward(const LinearProblem* p, float eps) {
#if defined(__AVX512BF16__)
    if (rounds(*p)) return run_together<LinearForward<Pair>>(*p, eps);
#endif
    p->causal ? run_together<LinearForward<float>>(*p, eps) : run_all<BidirectionalForward>(*p, eps);
}

void linattn_backward(const LinearProblem* p, float eps) {
#if defined(__AVX512BF16__)
    if (rounds(*p)) return run_together<LinearBackward<Pair>>(*p, eps);
#endif
    p->causal ? run_together<LinearBackward<float>>(*p, eps) : run_all<BidirectionalBackward>(*p, eps);
}

void linattn_delta_forward(const DeltaProblem* p, float eps) {
    if (p->step) return run_all<DeltaStep>(*p, eps);
    if (p->decays > 1) return run_all<ChannelForward>(*p, eps);
#if defined(__AVX512BF16__)
    if (rounds(*p)) return run_together<DeltaForward<Pair>>(*p, eps);
#endif
    run_together<DeltaForward<float>>(*p, eps);
}

void linattn_delta_backward(const DeltaProblem* p, float eps) {
    if (p->decays > 1) return run_all<ChannelBackward>(*p, eps);
#if defined(__AVX512BF16__)
    if (rounds(*p)) return run_all<DeltaBackward<Pair>>(*p, eps);
#endif
    run_all<DeltaBackward<float>>(*p, eps);
}

void linattn_window_forward(const WindowProblem* p, float scaling) {
#if defined(__AVX512BF16__)
    if (all_bfloat16({p->query, p->key, p->value}) && scaling > 0)
        return run_all<WindowForward<Pair>>(*p, scaling);
#endif
    run_all<WindowForward<float>>(*p, scaling);
}

void linattn_window_backward(const WindowProblem* p, float scaling) {
#if defined(__AVX512BF16__)
    if (all_bfloat16({p->query, p->key, p->value, p->d_output}) && scaling > 0)
        return run_all<WindowBackward<Pair>>(*p, scaling);
#endif
    run_all<WindowBackward<float>>(*p, scaling);
}

void linattn_softmax_map(const SoftmaxMapProblem* p, float floor) {
#if defined(__AVX512BF16__)
    if (all_bfloat16({p->input, p->weight})) return run_all<SoftmaxMapHead<Pair>>(*p, floor);
#endif
    run_all<SoftmaxMapHead<float>>(*p, floor);
}

void linattn_heavy(const HeavyProblem* p, float scaling) {
    if (p->length == 1) return run_all<HeavyToken>(*p, scaling);
#if defined(__AVX512BF16__)
    const Array& near = p->near.data ? p->near : p->query;
    if (all_bfloat16({p->query, near, p->key, p->value}) && scaling > 0)
        return run_all<HeavyForward<Pair>>(*p, scaling);
#endif
    run_all<HeavyForward<float>>(*p, scaling);
}

void linattn_window_decode(const WindowDecodeProblem* p, float scaling) {
    run_all<WindowDecode>(*p, scaling);
    advance_ring(*p);
}
}
