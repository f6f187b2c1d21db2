// What forward and backward share: the problem, and the chunks of one key head.

#pragma once

#include <cmath>
#include <limits>

#include "gate.h"
#include "pair.h"

enum Map : int64_t { NONE, ELU1, RELU };

// Filled in by ops/native.py, in this order.
struct Problem {
    int64_t batch, heads, kv_heads, length, keys, size, wide;  // `keys` as many as queries where causal
    int64_t map, normalise, causal, keep, chunk, threads;
    Gate gate;  // in place of `log_decay`
    Array query, key, value, output;
    int64_t hidden, hidden_row;  // bool [B, N], True at keys that do not count; 0 for none
    int64_t S, z;              // float32 [B, Hkv, D, Dv] and [B, Hkv, D], dense: the state before; 0 for none
    int64_t log_decay;         // float32 [B, Hkv, N], dense, at most 0; 0 for none
    int64_t documents;         // int64 [B, N], dense, ascending; 0 for one
    int64_t total;             // float32 [B, H, N], dense
    int64_t S_after, z_after;  // as S and z
    // of the backward: the loss by what the forward gave, 0 for none, and by what it was given
    Array d_output, d_query, d_key, d_value;
    int64_t d_total, d_S_after, d_z_after, d_S, d_z;
    int64_t d_decay;  // float32 [B, Hkv, N]: the loss by the running sums of log_decay
};

// min(max_d x_d, 0): over its exponential a query all of which is negative does not underflow, and it divides
// away.
inline float least_loss(const float* x, int size) {
    for (int i = 0; i < size; ++i)
        if (x[i] >= 0) return 0;  // after a few numbers, but for such queries
    Floats found = all(-__builtin_huge_valf());
    int i = 0;
    for (; i + WIDTH <= size; i += WIDTH) {
        const Floats given = load(x + i);
        found = given > found ? given : found;
    }
    float most = greatest(found);
    for (; i < size; ++i) most = std::max(most, x[i]);
    return most;
}

// phi of one row, in place; `slope`, if wanted, gets its derivative. Columns behind `size` become 0.
inline void feature_map(int64_t map, float eps, bool query, float* x, float* slope, int size) {
    if (map == NONE) return;
    int end = padded(size);
    if (map == RELU) {
        for (int i = 0; i < size; ++i) {
            if (slope) slope[i] = x[i] > 0;
            x[i] = (x[i] < 0 ? 0 : x[i]) + eps;
        }
        return;
    }
    const float most = query ? least_loss(x, size) : 0;
    for (int i = 0; i < end; i += WIDTH) {
        Floats given = load(x + i), zero = {};
        Floats power = exp_of((given > 0 ? zero : given) - most);
        store(x + i, (given < 0 ? zero : given) + power);
        if (slope) store(slope + i, power);
    }
    for (int i = size; i < end; ++i) x[i] = 0;
}

// The sums over keys before a chunk, S [D, Dv] (or its transpose) and z [D].
struct State {
    float *S, *z;
    bool empty;
};

constexpr float SPLIT = 40;  // e^40 times features and back is far from the ends of float32

// What decay and borders between documents do to one chunk, as `Links` of ops/chunks.py.
//
// Where no document begins in it, and it decays by no more than e^-SPLIT, e^(r_i - r_j) is a product, and
// queries and keys are read with a factor of it each (`split`): then the chunk is as one without decay, but
// that what is behind it takes `surviving` of all sums, its own keys among them. Else pairs have their own.
struct Links {
    bool given, split, pairs;
    float* running;   // log decay, summed from the start of the chunk
    float* document;  // small whole numbers
    float* reading;   // what each query takes of the state before the chunk
    float* entering;  // what the state after the chunk takes of each key; in a split one its factor
    float surviving;  // and of the state before
};

class Head : protected Pair<Problem> {
protected:
    const float eps_;
    const int chunk_, chunk_row_;
    float *query_, *key_, *value_;
    Links links_;

    Head(const Problem& p, float eps, int64_t pair, int64_t more_memory)
        : Pair(p, pair), eps_(eps), chunk_(longest(p)), chunk_row_(chunk_row(p)) {
        const int64_t n = chunk_row_;
        reserve(n * (2 * size_row_ + wide_row_ + 4) + more_memory);
        query_ = matrix(n, size_row_);
        key_ = matrix(n, size_row_);
        value_ = matrix(n, wide_row_);
        float* rows = matrix(4, n);
        memset(rows, 0, 4 * n * sizeof(float));
        links_ = {p.log_decay || p.gate.weight || p.documents,
                  false,
                  false,
                  rows,
                  rows + n,
                  rows + 2 * n,
                  rows + 3 * n,
                  1};
    }

    static int64_t longest(const Problem& p) { return std::min(p.chunk, std::max(p.length, p.keys)); }
    static int64_t chunk_row(const Problem& p) { return padded(longest(p)); }

    // What lies at these addresses, or nothing.
    State state(int64_t S, int64_t z) {
        State found{matrix(size_row_, wide_row_), matrix(size_row_, 1), true};
        fill(found, S, z);
        return found;
    }

    // The same, made where it is to be kept if its rows are whole vectors there.
    State state_to_keep() {
        if (!p_.keep || !whole()) return state(p_.S, p_.z);
        State found = place(p_.S_after, p_.z_after);
        found.empty = !p_.S;
        if (p_.S && p_.S != p_.S_after) copy(place(p_.S, p_.z), wide_row_, found, wide_row_);
        return found;
    }

    void fill(State& state, int64_t S, int64_t z) const {
        state.empty = !S;
        if (size_ != size_row_ || (S && wide_ != wide_row_)) {  // else all of it is written over
            memset(state.S, 0, size_row_ * wide_row_ * sizeof(float));
            memset(state.z, 0, size_row_ * sizeof(float));
        }
        if (S) copy(place(S, z), wide_, state, wide_row_);
    }

    void keep(const State& state, int64_t S, int64_t z) const {
        const State kept = place(S, z);
        if (kept.S != state.S) copy(state, wide_row_, kept, wide_);
    }

    bool whole() const { return size_ == size_row_ && wide_ == wide_row_; }

    // The state of this key head among those at two addresses.
    State place(int64_t S, int64_t z) const {
        return {at<float>(S) + pair_ * size_ * wide_, at<float>(z) + pair_ * size_, false};
    }

    void copy(const State& from, int from_row, const State& to, int to_row) const {
        memcpy(to.z, from.z, size_ * sizeof(float));
        if (from_row == to_row) {
            memcpy(to.S, from.S, size_ * to_row * sizeof(float));
            return;
        }
        for (int d = 0; d < size_; ++d)
            memcpy(to.S + d * to_row, from.S + d * from_row, wide_ * sizeof(float));
    }

    bool hidden(int64_t token) const {
        return p_.hidden && at<uint8_t>(p_.hidden)[row_ * p_.hidden_row + token];
    }

    // Features of keys, and values, 0 where hidden and behind the chunk; slopes too where wanted.
    void read_keys(int64_t start, int count, float* slopes = nullptr) {
        for (int j = 0; j < count; ++j) {
            float *key = key_ + j * size_row_, *value = value_ + j * wide_row_;
            if (hidden(start + j)) {  // not a product: there may be NaN
                memset(key, 0, size_row_ * sizeof(float));
                memset(value, 0, wide_row_ * sizeof(float));
                continue;
            }
            read_row(p_.key, head_, start + j, key, size_, size_row_);
            feature_map(p_.map, eps_, false, key, slopes ? slopes + j * size_row_ : nullptr, size_);
            if (links_.split) scale(key, links_.entering[j], size_row_);
            read_row(p_.value, head_, start + j, value, wide_, wide_row_);
        }
        const int behind = padded(count) - count;
        memset(key_ + count * size_row_, 0, behind * size_row_ * sizeof(float));
        memset(value_ + count * wide_row_, 0, behind * wide_row_ * sizeof(float));
    }

    void read_queries(int64_t head, int64_t start, int count, float* slopes = nullptr) {
        for (int i = 0; i < count; ++i) {
            float* query = query_ + i * size_row_;
            read_row(p_.query, head, start + i, query, size_, size_row_);
            feature_map(p_.map, eps_, true, query, slopes ? slopes + i * size_row_ : nullptr, size_);
            if (links_.split) scale(query, links_.reading[i], size_row_);
        }
    }

    // Of the sums before a token; 0 for none.
    float log_decay(int64_t token) {
        if (p_.log_decay) return at<float>(p_.log_decay)[pair_ * p_.length + token];
        if (!p_.gate.weight || hidden(token)) return 0;
        read_row(p_.value, head_, token, value_, wide_, wide_row_);  // which are not there yet
        return p_.gate.log_decay(head_, value_, wide_);
    }

    void read_links(int64_t start, int count) {
        if (!links_.given) return;
        const int64_t* labels = p_.documents ? at<int64_t>(p_.documents) + row_ * p_.length + start : nullptr;
        const int64_t before = labels ? labels[start ? -1 : 0] : 0;
        float running = 0;
        for (int i = 0; i < count; ++i) {
            links_.running[i] = running += log_decay(start + i);
            links_.document[i] = labels ? labels[i] - before : 0;
        }
        const float last = links_.document[count - 1];
        links_.split = !last && running >= -SPLIT;
        links_.pairs = !links_.split;
        const float behind = links_.split ? 0 : running;
        for (int i = 0; i < count; ++i) {
            links_.reading[i] = links_.document[i] ? 0 : std::exp(links_.running[i]);
            links_.entering[i] = links_.document[i] == last ? std::exp(behind - links_.running[i]) : 0;
        }
        links_.surviving = last ? 0 : std::exp(running);
    }

    // Row `row` of scores, in whole vectors: what the query takes of each key, and nothing of later ones.
    void link(float* scores, int row, int columns) const {
        if (links_.pairs)
            for (int j = 0; j < columns; j += WIDTH) {
                const Floats later = links_.running[row] - load(links_.running + j), zero = {};
                const Floats own = load(links_.document + j) - links_.document[row];
                const Floats share = exp_of(later > 0 ? zero : later);
                store(scores + j, load(scores + j) * (own == 0 ? share : zero));
            }
        hide_later(scores, row, columns);
    }

    // What is left of sums behind the chunk.
    void outlive(float* S, float* z, bool empty) const {
        if (!links_.given || empty) return;
        scale(S, links_.surviving, size_row_ * wide_row_);
        scale(z, links_.surviving, size_row_);
    }

    // Sums as they are behind the chunk; `add` adds its own keys to what is left, or before all is scaled.
    template <class Add>
    void advance(float* S, float* z, bool empty, int count, Add add) {
        if (links_.pairs) {
            outlive(S, z, empty);
            for (int j = 0; j < count; ++j) scale(key_ + j * size_row_, links_.entering[j], size_row_);
        }
        add();
        if (links_.split) outlive(S, z, false);
    }

    // Row `row` of scores of a chunk without those of later keys, in whole vectors.
    static void hide_later(float* scores, int row, int columns) {
        int j = row / WIDTH * WIDTH;
        const Floats zero = {};
        store(scores + j, lanes() > row - j ? zero : load(scores + j));
        for (j += WIDTH; j < columns; j += WIDTH) store(scores + j, zero);
    }

    // z = sum_j phi(k_j), or z += that.
    void add_keys(float* z, int count, bool add) const {
        for (int d = 0; d < size_row_; d += WIDTH) {
            Floats total = add ? load(z + d) : Floats{};
            for (int j = 0; j < count; ++j) total += load(key_ + j * size_row_ + d);
            store(z + d, total);
        }
    }

    // S = sum_j phi(k_j) v_j^T and z, or more of them.
    void add_pairs(State& state, int count) const {
        const Left keys{key_, 1, size_row_};
        product(keys, size_, count, value_, wide_row_, state.S, wide_row_, wide_row_, !state.empty);
        add_keys(state.z, count, !state.empty);
        state.empty = false;
    }

    // One row of output from its numerator.
    void write_output(int64_t head, int64_t token, float* numerator, float total) const {
        if (p_.normalise) {  // rows that see nothing give 0, as their numerator
            const float tiny = std::numeric_limits<float>::min();
            const float divisor = p_.map != NONE ? std::max(total, tiny) : total <= 0 ? 1 : total;
            for (int e = 0; e < wide_row_; e += WIDTH) store(numerator + e, load(numerator + e) / divisor);
        }
        write(p_.output, p_.output.at(row_, head, token), wide_, numerator);
    }
};
