// What forward and backward of linear attention share: feature maps, decay, and the chunks of one key head.

#pragma once

#include <cmath>
#include <limits>

#include "gate.h"
#include "key_head.h"

// min(max_d x_d, 0): divided by the exponential of it, a query that is negative throughout does not
// underflow. The factor divides away.
inline float query_shift(const float* x, int count) {
    for (int i = 0; i < count; ++i)
        if (x[i] >= 0) return 0;  // after a few numbers, but for such queries
    Floats peaks = broadcast(-__builtin_huge_valf());
    int i = 0;
    for (; i + WIDTH <= count; i += WIDTH) {
        const Floats values = load(x + i);
        peaks = values > peaks ? values : peaks;
    }
    float peak = max_of(peaks);
    for (; i < count; ++i) peak = std::max(peak, x[i]);
    return peak;
}

// phi of one row, in place; `derivative`, if wanted, gets that of phi. Columns behind `count` become 0.
inline void feature_map(int64_t map, float eps, bool query, float* x, float* derivative, int count) {
    if (map == NONE) return;
    int end = padded(count);
    if (map == RELU) {
        for (int i = 0; i < count; ++i) {
            if (derivative) derivative[i] = x[i] > 0;
            x[i] = (x[i] < 0 ? 0 : x[i]) + eps;
        }
        return;
    }
    const float shift = query ? query_shift(x, count) : 0;
    for (int i = 0; i < end; i += WIDTH) {
        Floats values = load(x + i), zero = {};
        Floats power = exp_nonpositive((values > 0 ? zero : values) - shift);
        store(x + i, (values < 0 ? zero : values) + power);
        if (derivative) store(derivative + i, power);
    }
    for (int i = count; i < end; ++i) x[i] = 0;
}

// The sums over keys before a chunk, S [D, Dv] (or its transpose) and z [D].
struct State {
    float *S, *z;
    bool empty;
};

constexpr float SPLIT = 40;  // e^40 times features and back is far from the ends of float32

constexpr int64_t STATE_LINE = 32;  // floats that two blocks of memory may begin behind each other

// What decay and borders between documents do to one chunk, as `ChunkDecay` of ops/eager/buffers.py.
//
// Where no document begins in it, and it decays by no more than e^-SPLIT, e^(r_i - r_j) is a product, and
// queries and keys are read with a factor of it each (`split`): the chunk is then as one without decay, but
// the state after it takes `state` of all sums, its own keys among them. Else each pair has its own
// (`pairwise`).
struct ChunkDecay {
    bool any, split, pairwise;
    float* running;   // log decay, summed from the start of the chunk
    float* document;  // small whole numbers
    float* query;     // what each query takes of the state before the chunk
    float* key;       // what the state after the chunk takes of each key; its factor where split
    float state;      // and of the state before
};

class LinearHead : protected KeyHead<LinearProblem> {
protected:
    const float eps_;
    const int chunk_, chunk_row_;
    float *query_, *key_, *value_;
    ChunkDecay decay_;

    LinearHead(const LinearProblem& p, float eps, int64_t batch_head, int64_t extra_floats)
        : KeyHead(p, batch_head), eps_(eps), chunk_(longest(p)), chunk_row_(chunk_row(p)) {
        const int64_t n = chunk_row_;
        reserve(n * (2 * key_row_ + value_row_ + 4) + extra_floats);
        query_ = alloc(n, key_row_);
        key_ = alloc(n, key_row_);
        value_ = alloc(n, value_row_);
        float* rows = alloc(4, n);
        memset(rows, 0, 4 * n * sizeof(float));
        decay_ = {p.log_decay || p.gate.weight || p.documents,
                  false,
                  false,
                  rows,
                  rows + n,
                  rows + 2 * n,
                  rows + 3 * n,
                  1};
    }

    static int64_t longest(const LinearProblem& p) { return std::min(p.chunk, std::max(p.length, p.keys)); }
    static int64_t chunk_row(const LinearProblem& p) { return padded(longest(p)); }

    static int64_t state_floats(const LinearProblem& p) {
        return int64_t(padded(p.head_dim)) * (padded(p.value_dim) + 1) + STATE_LINE;
    }

    // A state in scratch memory: a copy of what lies at these addresses, or empty.
    State new_state(int64_t S, int64_t z) {
        State state{alloc(key_row_, value_row_), alloc(key_row_, 1), true};
        load_state(state, S, z);
        return state;
    }

    // The same, but where it is to be stored if its rows are whole vectors there.
    State new_state_to_store() {
        if (!p_.keep_state || !unpadded()) return new_state(p_.S, p_.z);
        State state = state_view(p_.S_after, p_.z_after);
        state.empty = !p_.S;
        if (p_.S && p_.S != p_.S_after) copy(state_view(p_.S, p_.z), value_row_, state, value_row_);
        return state;
    }

    void load_state(State& state, int64_t S, int64_t z) const {
        state.empty = !S;
        if (head_dim_ != key_row_ || (S && value_dim_ != value_row_)) {  // else all of it is written over
            memset(state.S, 0, key_row_ * value_row_ * sizeof(float));
            memset(state.z, 0, key_row_ * sizeof(float));
        }
        if (S) copy(state_view(S, z), value_dim_, state, value_row_);
    }

    void store_state(const State& state, int64_t S, int64_t z) const {
        const State target = state_view(S, z);
        if (target.S != state.S) copy(state, value_row_, target, value_dim_);
    }

    bool unpadded() const { return head_dim_ == key_row_ && value_dim_ == value_row_; }

    // The state of this key head among those at two addresses.
    State state_view(int64_t S, int64_t z) const {
        return {at<float>(S) + batch_head_ * head_dim_ * value_dim_, at<float>(z) + batch_head_ * head_dim_,
                false};
    }

    void copy(const State& from, int from_row, const State& to, int to_row) const {
        memcpy(to.z, from.z, head_dim_ * sizeof(float));
        if (from_row == to_row) {
            memcpy(to.S, from.S, head_dim_ * to_row * sizeof(float));
            return;
        }
        for (int d = 0; d < head_dim_; ++d)
            memcpy(to.S + d * to_row, from.S + d * from_row, value_dim_ * sizeof(float));
    }

    // Features of keys, and values, 0 where hidden and behind the chunk; derivatives of the map where wanted.
    void read_keys(int64_t start, int count, float* derivatives = nullptr) {
        for (int j = 0; j < count; ++j) {
            float *key = key_ + j * key_row_, *value = value_ + j * value_row_;
            if (hidden(start + j)) {  // not a product: there may be NaN
                memset(key, 0, key_row_ * sizeof(float));
                memset(value, 0, value_row_ * sizeof(float));
                continue;
            }
            read_row(p_.key, head_, start + j, key, head_dim_, key_row_);
            feature_map(p_.feature_map, eps_, false, key, derivatives ? derivatives + j * key_row_ : nullptr,
                        head_dim_);
            if (decay_.split) scale(key, decay_.key[j], key_row_);
            read_row(p_.value, head_, start + j, value, value_dim_, value_row_);
        }
        const int behind = padded(count) - count;
        memset(key_ + count * key_row_, 0, behind * key_row_ * sizeof(float));
        memset(value_ + count * value_row_, 0, behind * value_row_ * sizeof(float));
    }

    void read_queries(int64_t head, int64_t start, int count, float* derivatives = nullptr) {
        for (int i = 0; i < count; ++i) {
            float* query = query_ + i * key_row_;
            read_row(p_.query, head, start + i, query, head_dim_, key_row_);
            feature_map(p_.feature_map, eps_, true, query, derivatives ? derivatives + i * key_row_ : nullptr,
                        head_dim_);
            if (decay_.split) scale(query, decay_.query[i], key_row_);
        }
    }

    // What a token decays the sums before it by; 0 for none.
    float log_decay(int64_t token) {
        if (p_.log_decay) return at<float>(p_.log_decay)[batch_head_ * p_.length + token];
        if (!p_.gate.weight || hidden(token)) return 0;
        read_row(p_.value, head_, token, value_, value_dim_, value_row_);  // free: read_keys comes later
        return log_decay_of(p_.gate, head_, value_, value_dim_);
    }

    void read_decay(int64_t start, int count) {
        if (!decay_.any) return;
        const int64_t* labels = p_.documents ? at<int64_t>(p_.documents) + row_ * p_.length + start : nullptr;
        const int64_t before = labels ? labels[start ? -1 : 0] : 0;
        float running = 0;
        for (int i = 0; i < count; ++i) {
            decay_.running[i] = running += log_decay(start + i);
            decay_.document[i] = labels ? labels[i] - before : 0;
        }
        const float last = decay_.document[count - 1];
        decay_.split = !last && running >= -SPLIT;
        decay_.pairwise = !decay_.split;
        const float behind = decay_.split ? 0 : running;
        for (int i = 0; i < count; ++i) {
            decay_.query[i] = decay_.document[i] ? 0 : std::exp(decay_.running[i]);
            decay_.key[i] = decay_.document[i] == last ? std::exp(behind - decay_.running[i]) : 0;
        }
        decay_.state = last ? 0 : std::exp(running);
    }

    // Row `row` of scores, in whole vectors: decayed from each key to the query, and 0 of later keys.
    void mask_scores(float* scores, int row, int columns) const {
        if (decay_.pairwise)
            for (int j = 0; j < columns; j += WIDTH) {
                const Floats later = decay_.running[row] - load(decay_.running + j), zero = {};
                const Floats border = load(decay_.document + j) - decay_.document[row];
                const Floats share = exp_nonpositive(later > 0 ? zero : later);
                store(scores + j, load(scores + j) * (border == 0 ? share : zero));
            }
        mask_later(scores, row, columns);
    }

    // What is left of a state after the chunk.
    void apply_decay(float* S, float* z, bool empty) const {
        if (!decay_.any || empty) return;
        scale(S, decay_.state, key_row_ * value_row_);
        scale(z, decay_.state, key_row_);
    }

    // A state after the chunk; `add` adds the chunk's keys to what is left of it, or before all is scaled.
    template <class Add>
    void update_state(float* S, float* z, bool empty, int count, Add add) {
        if (decay_.pairwise) {
            apply_decay(S, z, empty);
            for (int j = 0; j < count; ++j) scale(key_ + j * key_row_, decay_.key[j], key_row_);
        }
        add();
        if (decay_.split) apply_decay(S, z, false);
    }

    // Row `row` of scores, in whole vectors, 0 of later keys.
    static void mask_later(float* scores, int row, int columns) {
        int j = row / WIDTH * WIDTH;
        const Floats zero = {};
        store(scores + j, lanes() > row - j ? zero : load(scores + j));
        for (j += WIDTH; j < columns; j += WIDTH) store(scores + j, zero);
    }

    // z = sum_j phi(k_j), or z += that.
    void add_keys(float* z, int count, bool add) const {
        for (int d = 0; d < key_row_; d += WIDTH) {
            Floats total = add ? load(z + d) : Floats{};
            for (int j = 0; j < count; ++j) total += load(key_ + j * key_row_ + d);
            store(z + d, total);
        }
    }

    // Add phi(k_j) v_j^T and phi(k_j) of a chunk to S and z.
    void add_keys_and_values(State& state, int count) const {
        const LeftFactor keys{key_, 1, key_row_};
        product(keys, head_dim_, count, value_, value_row_, state.S, value_row_, value_row_, !state.empty);
        add_keys(state.z, count, !state.empty);
        state.empty = false;
    }

    // One row of output from its numerator.
    void write_output(int64_t head, int64_t token, float* numerator, float total) const {
        if (p_.normalise) {  // rows that see nothing give 0, as their numerator
            const float tiny = std::numeric_limits<float>::min();
            const float divisor = p_.feature_map != NONE ? std::max(total, tiny) : total <= 0 ? 1 : total;
            if (divisor < tiny)  // 1 / divisor may be infinite
                for (int e = 0; e < value_row_; e += WIDTH) store(numerator + e, load(numerator + e) / divisor);
            else
                scale(numerator, 1 / divisor, value_row_);
        }
        write(p_.output, offset(p_.output, row_, head, token), value_dim_, numerator);
    }
};
